/* The program, in a thread of its own: each question is a command line, and gets a new instance, as a person would start the
 * program anew. flexgen() is emscripten's, in front of this. A question is {id, args, files: {name: text}, read: [names]}, its
 * answer {id, status, said, files}. */
"use strict";
let compiled;

async function ask({id, args, files, read}) {
  const said = [], answer = {id, status: 1, said, files: {}};
  const program = await flexgen({
    print() {}, printErr: line => said.push(line),
    instantiateWasm(imports, done) { WebAssembly.instantiate(compiled, imports).then(done); return {}; },
  });
  for (const [name, text] of Object.entries(files)) program.FS.writeFile(name, text);
  try {
    answer.status = program.callMain(args);
  } catch (e) { // exit() and abort() are exceptions here
    answer.status = e.status || 1;
    if (e.status === undefined) said.push(String(e));
  }
  for (const name of answer.status ? [] : read) answer.files[name] = program.FS.readFile(name, {encoding: "utf8"});
  return answer;
}

onmessage = async e => {
  if (e.data.module) compiled = e.data.module;
  else postMessage(await ask(e.data));
};
