// Run the OpenClaw in the current folder once against a model that says nothing, so that Node's compile cache is made.
//   node warm_openclaw.mjs ./node_modules/openclaw/openclaw.mjs ./compile-cache
import { spawn } from "node:child_process";
import { once } from "node:events";
import { mkdirSync, mkdtempSync, rmSync, writeFileSync } from "node:fs";
import { createServer } from "node:http";
import { tmpdir } from "node:os";
import { join, resolve } from "node:path";

const RUN_MS = 240_000;

function chunk(delta, finish_reason) {
  const body = { id: "warm", object: "chat.completion.chunk", created: 0, model: "m", choices: [{ index: 0, delta, finish_reason }] };
  return `data: ${JSON.stringify(body)}\n\n`;
}

function answer(messages) {
  if (messages.some((message) => message.role === "tool")) return [{ role: "assistant", content: "Done." }, "stop"];
  const call = { index: 0, id: "call_0", type: "function", function: { name: "exec", arguments: '{"command":"true"}' } };
  return [{ role: "assistant", tool_calls: [call] }, "tool_calls"];
}

async function serve() {
  const server = createServer(async (request, response) => {
    let text = "";
    for await (const piece of request) text += piece;
    const [delta, finish_reason] = answer(JSON.parse(text).messages);
    response.writeHead(200, { "content-type": "text/event-stream" });
    response.end(chunk(delta, null) + chunk({}, finish_reason) + "data: [DONE]\n\n");
  });
  server.listen(0, "127.0.0.1");
  await once(server, "listening");
  return server;
}

function config(port, workspace) {
  const models = [{ id: "m", name: "m", contextWindow: 64000, maxTokens: 1024 }];
  const provider = { baseUrl: `http://127.0.0.1:${port}/v1`, apiKey: "x", api: "openai-completions", models };
  return {
    models: { mode: "replace", providers: { proxy: provider } },
    agents: { defaults: { model: { primary: "proxy/m" }, workspace, skipBootstrap: true } },
    tools: { toolSearch: false },
  };
}

async function run(program, cache, port) {
  const home = mkdtempSync(join(tmpdir(), "warm-openclaw-"));
  const workspace = join(home, ".openclaw", "workspace");
  mkdirSync(workspace, { recursive: true });
  writeFileSync(join(home, ".openclaw", "openclaw.json"), JSON.stringify(config(port, workspace)));
  const env = {
    HOME: home,
    PATH: process.env.PATH,
    OPENCLAW_NO_AUTO_UPDATE: "1",
    OPENCLAW_DISABLE_BUNDLED_PLUGINS: "1",
    OPENCLAW_NO_RESPAWN: "1",
    OPENCLAW_PACKAGED_COMPILE_CACHE_RESPAWNED: "1",
    NODE_COMPILE_CACHE: resolve(cache),
    NODE_COMPILE_CACHE_PORTABLE: "1",
  };
  const argv = [...process.execArgv, resolve(program), "agent", "--local", "--agent", "main", "--session-id", "warm"];
  const options = { cwd: workspace, env, timeout: RUN_MS, stdio: ["ignore", "ignore", "inherit"] };
  const [status, signal] = await once(spawn(process.execPath, [...argv, "--message", "Do it."], options), "close");
  rmSync(home, { recursive: true, force: true });
  if (status !== 0) throw new Error(`OpenClaw ended with ${status ?? signal}`);
}

const server = await serve();
await run(process.argv[2], process.argv[3], server.address().port);
server.closeAllConnections();
server.close();
