/* docs/paper.html: keys go from station to station, and a short address finds the first station that begins so. */
const stations = [...document.querySelectorAll(".station")], contents = document.getElementById("contents");

function go(to) {
  history.replaceState(null, "", "#" + to.id);
  to.scrollIntoView();
  to.querySelector("h3 a, a").focus({preventScroll: true});
}

// The station whose title is at the top of the window, or has left it; -1: none has.
function current() {
  let n = -1;
  while (n + 1 < stations.length && stations[n + 1].getBoundingClientRect().top < 12) n++;
  return n;
}

function step(by) {
  const n = current();
  if (by < 0 && n >= 0 && stations[n].getBoundingClientRect().top < -12) return go(stations[n]);
  if (n + by < 0) return go(contents);
  if (n + by < stations.length) go(stations[n + by]);
}

addEventListener("keydown", event => {
  const arrow = event.key === "ArrowRight" || event.key === "ArrowLeft";
  if (event.ctrlKey || event.altKey || event.metaKey || (arrow && event.target.scrollWidth > event.target.clientWidth && event.target.tabIndex === 0
      && event.target.matches("pre, .formula, .wide"))) return;
  if (event.key === "j" || event.key === "ArrowRight") step(1);
  else if (event.key === "k" || event.key === "ArrowLeft") step(-1);
  else if (event.key === "c") go(contents);
  else return;
  event.preventDefault();
});

function findByAddress() {
  const wanted = decodeURIComponent(location.hash.slice(1));
  const found = wanted && !document.getElementById(wanted) && stations.find(s => s.id.toLowerCase().startsWith(wanted.toLowerCase()));
  if (found) go(found);
}
addEventListener("hashchange", findByAddress);
findByAddress();
