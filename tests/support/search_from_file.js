// Searches as a page that was opened as a file does: the stand-in for the worker, the worker, an index.
// node search_from_file.js STAND-IN WORKER INDEX QUERY
const fs = require("fs"), vm = require("vm")
const [shim, worker, index] = process.argv.slice(2, 5).map(path => fs.readFileSync(path, "utf8"))
function frameWindow() {
  const target = new EventTarget()
  const inside = { MessageEvent, console, addEventListener: target.addEventListener.bind(target), dispatchEvent: target.dispatchEvent.bind(target) }
  inside.self = inside
  inside.parent = {}
  vm.createContext(inside)
  inside.document = { createElement: () => ({}), open() {}, write() {}, close() {}, body: { appendChild: script => { vm.runInContext(worker, inside); setTimeout(script.onload) } } }
  return inside
}
const page = { EventTarget, MessageEvent, URL, location: { protocol: "file:", href: "file:///site/index.html" } }
page.window = page
page.document = { createElement: () => ({}), body: { appendChild: frame => { frame.contentWindow = frameWindow() } } }
vm.runInNewContext(shim, page)
const found = new page.Worker("assets/worker.js")
found.addEventListener("message", ({ data }) => {
  if (data.type === 1) found.postMessage({ type: 2, data: process.argv[5] })
  else { console.log(JSON.stringify(data.data.items.flat().map(item => item.location))) }
})
found.postMessage({ type: 0, data: JSON.parse(index) })
