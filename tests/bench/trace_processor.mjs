// Perfetto's trace processor, compiled to WebAssembly as in Perfetto's own UI, behind a unix socket: what goes in and comes
// out is its RPC byte stream, as with `trace_processor server unix`. Usage: node trace_processor.mjs ASSETS SOCKET
import fs from "node:fs";
import net from "node:net";
import path from "node:path";
import vm from "node:vm";

const [assets, socketPath] = process.argv.slice(2);

// The bundle was built for a web worker; this is what it looks for of one.
globalThis.self = globalThis;
globalThis.WorkerGlobalScope = class {};
globalThis.location = { href: "file:///engine_bundle.js" };
globalThis.XMLHttpRequest = class {
  open(_method, name) {
    this.response = fs.readFileSync(path.join(assets, path.basename(name)));
  }
  send() {}
};

// Only the 32-bit module is in the package: the probe for 64-bit memory, the first module made, must fail.
const Module = WebAssembly.Module;
WebAssembly.Module = function () {
  WebAssembly.Module = Module;
  throw new Error("no 64-bit memory");
};
console.warn = console.log = (...words) => process.stderr.write(words.join(" ") + "\n");

vm.runInThisContext(fs.readFileSync(path.join(assets, "engine_bundle.node.js"), "utf8"));
const { port1, port2 } = new MessageChannel();
self.onmessage({ data: port1 });

const server = net.createServer((socket) => {
  server.close(); // one client, then the end
  socket.on("data", (data) => port2.postMessage(new Uint8Array(data)));
  socket.on("close", () => process.exit(0));
  port2.onmessage = (message) => socket.write(message.data);
});
server.listen(socketPath, () => process.stdout.write("ready\n"));
