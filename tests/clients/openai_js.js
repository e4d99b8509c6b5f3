// What OpenAI's client for Node asks of a service; its arguments are the URL of the service and a good key.
'use strict';
const {OpenAI} = require('openai');
const [baseURL, apiKey] = process.argv.slice(2);
const client = new OpenAI({baseURL: baseURL + '/v1', apiKey});

// Name, status, code and param of the error.
const raised = async (asked) => {
  try {
    return ['no error', JSON.stringify(await asked)];
  } catch (error) {
    return [error.constructor.name, error.status, error.code, error.param];
  }
};

(async () => {
  const model = 'default';
  const response = await client.responses.create({model, input: 'hello', instructions: 'be brief'});
  const events = [];
  let streamed = '';
  for await (const event of await client.responses.create({model, input: [{role: 'user', content: 'hello'}], stream: true})) {
    events.push(event.type);
    if (event.type === 'response.output_text.delta') streamed += event.delta;
  }
  const gathered = await client.responses.stream({model, input: 'hello'}).finalResponse();
  const input = Array.from({length: 2048}, (_, number) => 'e:' + number);
  const embeddings = await client.embeddings.create({model, input});
  console.log(JSON.stringify({
    response: [response.output_text, response.status, response.usage, response.instructions],
    events: events.map((type) => type.replace('response.', '')),
    streamed,
    gathered: gathered.output_text,
    embeddings: [embeddings.data.length, embeddings.data[0].embedding, embeddings.data[2047].embedding],
    errors: {
      tools: await raised(client.responses.create({model, input: 'a', tools: [{type: 'web_search'}]})),
      stored: await raised(client.responses.create({model, input: 'a', previous_response_id: 'resp_1'})),
      files: await raised(client.files.list()),
      base: await raised(new OpenAI({baseURL, apiKey}).responses.create({model, input: 'a'})),
    },
  }));
})();
