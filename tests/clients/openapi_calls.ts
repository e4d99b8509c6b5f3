// A call of every operation of a client that @hey-api/openapi-ts makes of a service's contract, with the types of that.
import { client } from './made/client.gen';
import * as made from './made';

type Answer<T> = { data?: T; error?: unknown; response?: Response };

export async function run(url: string): Promise<object> {
  client.setConfig({ baseUrl: url });
  const called: string[] = [];
  const texts: unknown[] = [];

  async function of<T>(name: string, answer: Promise<Answer<T>>, status = 200): Promise<T> {
    const found = await answer;
    if (found.response?.status !== status) throw new Error(`${name}: ${found.response?.status} ${JSON.stringify(found.error)}`);
    called.push(name);
    return found.data as T;
  }

  texts.push((await of('plainInference', made.plainInference({ body: { input: 'a' } })) as made.PlainAnswer).output);
  texts.push((await of('predict', made.predict({ body: { model_id: 'text', input_data: 'b' } })) as made.PredictAnswer).output);
  texts.push((await of('predict', made.predict({ body: { model_id: 'text', input_data: 'c' } })) as made.PredictAnswer).output);
  texts.push((await of('inference', made.inference({ body: { inputs: ['d', 'e'] } })) as made.InferenceAnswer).outputs);
  texts.push((await of('inference', made.inference({ body: { input: 'YWI=', model: 'octets' } })) as made.InferenceAnswer).output);
  texts.push((await of('inference', made.inference({ body: { input: 'f', parameters: null } })) as made.InferenceAnswer).output);
  const asked = made.inference({ body: { input: 'g' }, headers: { Prefer: 'respond-async' } });
  const task = (await of('inference', asked, 202) as made.Task).task_id;
  texts.push((await of('result', made.result({ path: { task_id: task }, query: { wait: '20' } }))).output);
  await of('forget', made.forget({ path: { task_id: task } }), 204);
  const refused = (await made.inference({ body: {} })).error as made.Problem;
  await of('live', made.live());
  await of('ready', made.ready());
  await of('health', made.health());
  await of('oipServer', made.oipServer());
  await of('oipLive', made.oipLive());
  await of('oipReady', made.oipReady());
  await of('oipAllStatistics', made.oipAllStatistics());
  await of('models', made.models());
  await of('model', made.model({ path: { id: 'text' } }));
  const chat = await of('chat', made.chat({ body: { messages: [{ role: 'user', content: 'h' }] } })) as made.ChatAnswer;
  texts.push((chat.choices[0].message as { content: string }).content);
  texts.push((await of('complete', made.complete({ body: { prompt: 'i' } })) as made.CompletionAnswer).choices[0].text);
  await of('respond', made.respond({ body: { input: 'k' } }));
  const numbers = (await of('embed', made.embed({ body: { input: 'e:' } }))).data[0].embedding;
  const body: made.OipRequest = { inputs: [{ name: 'INPUT0', datatype: 'BYTES', shape: [1], data: ['j'] }] };
  const model = { model: 'text' };
  const version = { model: 'text', version: '1' };
  await of('oipModelMetadata', made.oipModelMetadata({ path: model }));
  await of('oipModelReady', made.oipModelReady({ path: model }));
  await of('oipModelConfig', made.oipModelConfig({ path: model }));
  await of('oipModelStatistics', made.oipModelStatistics({ path: model }));
  texts.push((await of('oipModelInfer', made.oipModelInfer({ body, path: model })) as made.OipAnswer).outputs[0].data[0]);
  await of('oipVersionMetadata', made.oipVersionMetadata({ path: version }));
  await of('oipVersionReady', made.oipVersionReady({ path: version }));
  await of('oipVersionConfig', made.oipVersionConfig({ path: version }));
  await of('oipVersionStatistics', made.oipVersionStatistics({ path: version }));
  texts.push((await of('oipVersionInfer', made.oipVersionInfer({ body, path: version })) as made.OipAnswer).outputs[0].data[0]);
  texts.push((await of('oipInfer', made.oipInfer({ body })) as made.OipAnswer).outputs[0].data[0]);
  await of('oipIndex', made.oipIndex({ body: {} }));
  return { called: [...new Set(called)].sort(), texts, numbers, refused: refused.error };
}
