/* docs/slides.html: one slide at a time. Without this script all slides stand below one another. */
const slides = [...document.querySelectorAll(".slide")], contents = document.getElementById("contents"), help = document.getElementById("help");
const jump = document.getElementById("jump"), button = name => document.getElementById(name);
let at = 0, typed = "";

function say(text) {
  jump.textContent = text;
}

function show(n, moves = true) {
  overview(false);
  at = Math.max(0, Math.min(slides.length - 1, n));
  slides.forEach((s, m) => s.classList.toggle("current", m === at));
  scrollTo(0, 0);
  if (moves) {
    history.replaceState(null, "", "#" + slides[at].id);
    slides[at].querySelector("h2").focus({preventScroll: true});
  }
  say(`${at + 1} of ${slides.length}`);
}

function overview(on) {
  document.body.classList.toggle("overview", on);
  contents.hidden = !on;
  button("all").setAttribute("aria-expanded", on);
  if (on) [...contents.querySelectorAll("a")].find(a => a.hash === "#" + slides[at].id).focus();
}

function notes() {
  button("notes").setAttribute("aria-pressed", document.body.classList.toggle("notes"));
}

function keys() {
  help.hidden = !help.hidden;
  button("keys").setAttribute("aria-expanded", !help.hidden);
}

const ACTIONS = {
  ArrowRight: () => show(at + 1), PageDown: () => show(at + 1), ArrowLeft: () => show(at - 1), PageUp: () => show(at - 1),
  Home: () => show(0), End: () => show(slides.length - 1), o: () => overview(contents.hidden), n: notes, "?": keys,
  Escape: () => { typed = ""; help.hidden = true; show(at); },
};

addEventListener("keydown", event => {
  if (event.ctrlKey || event.altKey || event.metaKey) return;
  if (/^\d$/.test(event.key)) {
    typed += event.key;
    say(`slide ${typed}, then Enter`);
  } else if (event.key === "Enter" && typed) {
    show(typed - 1);
    typed = "";
  } else if (ACTIONS[event.key]) {
    const sideways = event.target.closest(".picture, pre");
    if (sideways && event.key.startsWith("Arrow") && sideways.scrollWidth > sideways.clientWidth) return;
    ACTIONS[event.key]();
  } else return;
  event.preventDefault();
});

function findByAddress(moves) {
  const name = decodeURIComponent(location.hash.slice(1)), n = slides.findIndex(s => s.id === name);
  show(Math.max(n, 0), moves && n >= 0);
}

button("before").onclick = () => show(at - 1);
button("after").onclick = () => show(at + 1);
button("all").onclick = () => overview(contents.hidden);
button("notes").onclick = notes;
button("keys").onclick = keys;
addEventListener("hashchange", () => findByAddress(true));
document.body.classList.add("deck");
findByAddress(false);
