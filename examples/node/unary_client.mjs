// Publish, pull, settle and own queues from Node.js, by unary calls of the contract in proto/.
//
//     npm ci && node unary_client.mjs 127.0.0.1:7400
//
// Any broker may be called: it forwards what another one holds. Two names of queues may follow the
// address. GOOGLEAPIS is a directory with google/rpc/status.proto, which the contract imports; by
// default that of the Python environment which `make` creates.

import { readdirSync } from "node:fs";
import { join } from "node:path";
import { fileURLToPath } from "node:url";
import { promisify } from "node:util";
import grpc from "@grpc/grpc-js";
import { loadSync } from "@grpc/proto-loader";

const ROOT = fileURLToPath(new URL("../..", import.meta.url));
const CALL_TIMEOUT_MS = 60_000;
const PULL_WAIT_MS = 30_000;

const [address = "127.0.0.1:7400", jobs = "jobs/resize", chat = "chats/ada"] = process.argv.slice(2);

const PACKAGE = "tidemark/api/broker/v1";
const contract = grpc.loadPackageDefinition(
  loadSync([`${PACKAGE}/broker.proto`, `${PACKAGE}/topic.proto`], {
    includeDirs: [join(ROOT, "proto"), process.env.GOOGLEAPIS ?? googleapis()],
    keepCase: true,
    longs: String, // 64 bits do not fit into a number
    enums: String,
    defaults: true,
    oneofs: true,
  }),
).tidemark.api.broker.v1;
const broker = callable(contract.BrokerService);
const topics = callable(contract.TopicService);

/** The packages of the Python environment, among which is googleapis-common-protos. */
function googleapis() {
  const lib = join(ROOT, ".venv", "lib");
  return join(lib, readdirSync(lib).find((name) => name.startsWith("python")), "site-packages");
}

/** The methods of a service as functions that return promises. */
function callable(Service) {
  const stub = new Service(address, grpc.credentials.createInsecure());
  const methods = Object.keys(Service.service).filter((name) => !Service.service[name].requestStream);
  return Object.fromEntries(
    methods.map((name) => {
      const call = promisify(stub[name].bind(stub));
      return [name, (request) => call(request, { deadline: Date.now() + CALL_TIMEOUT_MS })];
    }),
  );
}

async function createTopic(name, settings) {
  try {
    await topics.CreateTopic({ name, settings });
  } catch (error) {
    if (error.code !== grpc.status.ALREADY_EXISTS) throw error;
  }
}

/** Publish one message; throws why it was refused. Each run of a call has a result of its own. */
async function publish(client_id, lmq_name, text) {
  const run = { lmq_name, count: 1, batch: { messages: [{ payload: Buffer.from(text) }] } };
  const { results } = await broker.Publish({ client_id, runs: [run] });
  if (results[0].error) throw new Error(results[0].error.message);
  return results[0].receipt;
}

/** Wait for messages: an empty answer means that none came, or that the queue is not the client's. */
async function pull(client_id, lmq_name, wait_ms = PULL_WAIT_MS) {
  return broker.Pull({ client_id, lmq_name, wait_ms, max_messages: 10 });
}

async function ack(client_id, { receipt }) {
  const { results } = await broker.Settle({ client_id, settlements: [{ receipt, ack: {} }] });
  if (results[0].error) throw new Error(results[0].error.message);
  return results[0].messages;
}

/** Take an exclusive queue, also from another client. The epoch shows which of them came last. */
async function own(client_id, lmq_name) {
  const sync = { mode: "SYNC_MODE_PARTIAL_ADD", entries: [{ lmq_name }] };
  const { result } = await broker.SyncSubscriptions({ client_id, sync });
  const [{ state, epoch, error }] = result.results;
  if (error) throw new Error(error.message);
  return { state, epoch: BigInt(epoch) };
}

const textOf = ({ batch }) => batch.messages.map(({ payload }) => payload.toString()).join();

// --- a shared queue -------------------------------------------------------------------------------

await createTopic("jobs", {});
const { partition } = await publish("node", jobs, "resize cat.png");
console.log(`published to partition ${partition}`);
const [job] = (await pull("node", jobs)).deliveries;
console.log(`pulled ${textOf(job)}`);
console.log(`acknowledged ${await ack("node", job)}`);

// --- an exclusive queue, and its takeover ---------------------------------------------------------

await createTopic("chats", { subscription: "SUBSCRIPTION_KIND_EXCLUSIVE" });
const laptop = await own("laptop", chat);
await publish("node", chat, "Hi Ada");
const [greeting] = (await pull("laptop", chat)).deliveries;
console.log(`laptop: ${textOf(greeting)} (${laptop.state})`);
const phone = await own("phone", chat);
console.log(`the phone's epoch is higher: ${phone.epoch > laptop.epoch}`);
const evicted = await pull("laptop", chat, 0);
console.log(`laptop: ${evicted.deliveries.length} messages (${evicted.subscription_state})`);
const [again] = (await pull("phone", chat)).deliveries;
console.log(`phone: ${textOf(again)}, acknowledged ${await ack("phone", again)}`);
await ack("laptop", greeting).then(
  () => console.log("laptop: acknowledged as well"),
  (error) => console.log(`laptop: too late, ${error.message}`),
);

// --- what is refused ------------------------------------------------------------------------------

await publish("node", "unknown/queue", "lost").catch((error) => console.log(error.message));
