// What @grpc/grpc-js asks, which has no code in common with gRPC's for Python and reads our .proto files. Its arguments are the
// port's address, a good key, one for a request a minute, and the folder of these files. After its first line it asks without end, until the port is gone.
'use strict';
const [grpc, loader] = [require('@grpc/grpc-js'), require('@grpc/proto-loader')];
const [address, key, slow, protos] = process.argv.slice(2);
const load = (file) => grpc.loadPackageDefinition(loader.loadSync(file, {includeDirs: [protos], keepCase: true, longs: Number}));
const plain = grpc.credentials.createInsecure();
const headway = new (load('headway/v1/inference.proto').headway.v1.Inference)(address, plain);
const triton = new (load('inference/open_inference.proto').inference.GRPCInferenceService)(address, plain);
const health = new (load('grpc/health/v1/health.proto').grpc.health.v1.Health)(address, plain);

// The answer, or the error.
const ask = (client, method, request, known = key, options = {}) => new Promise((resolve) => {
  const metadata = new grpc.Metadata();
  if (known) metadata.set('authorization', 'Bearer ' + known);
  client[method](request, metadata, options, (error, answer) => resolve(error || answer));
});
const predict = (text, ...how) => ask(headway, 'Predict', {input_data: Buffer.from(text)}, ...how);
// Code of an error, and whether a retry makes sense.
const refusal = async (asked) => {
  const error = await asked;
  return [error.code, (error.metadata && error.metadata.get('grpc-retry-pushback-ms')[0]) || null];
};

(async () => {
  await predict('a', slow);
  const tensor = {name: 'INPUT', datatype: 'BYTES', shape: [2], contents: {bytes_contents: [Buffer.from('a'), Buffer.from('b')]}};
  const infer = await ask(triton, 'ModelInfer', {model_name: 'default', id: 'q', inputs: [tensor]});
  console.log(JSON.stringify({
    predict: (await predict('hello')).output.toString(),
    infer: [infer.id, infer.raw_output_contents[0].toString('hex')],
    health: (await ask(health, 'Check', {}, '')).status,
    refusals: {
      stranger: await refusal(predict('a', '')),
      unknown: await refusal(ask(headway, 'Predict', {model_id: 'other'})),
      late: await refusal(predict('slow', key, {deadline: Date.now() + 1})),
      bad: await refusal(predict('bad')),
      fault: await refusal(predict('fault')),
      large: await refusal(predict('a'.repeat(2000000))),
      slow: await refusal(predict('a', slow)),
      load: await refusal(ask(triton, 'RepositoryModelLoad', {model_name: 'default'})),
    },
  }));
  const counts = {};
  const asking = async () => {
    for (;;) {
      const answer = await predict('x');
      if (answer.request_id) counts.ok = (counts.ok || 0) + 1;
      else if (/No connection established|ECONNREFUSED/.test(answer.details)) return;
      else counts[answer.details] = (counts[answer.details] || 0) + 1;
      if (counts.ok === 50) console.log('enough');
    }
  };
  await Promise.all(Array.from({length: 16}, asking));
  console.log(JSON.stringify(counts));
  process.exit(0);
})();
