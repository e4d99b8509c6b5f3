// What a client that @hey-api/openapi-ts makes of a service's contract gets from each of its routes, as the TypeScript beside
// this file calls them, once the compiler has checked that against the client's types.
// Arguments: URL of the service, and an empty folder for the client.
'use strict';
const { execFileSync } = require('node:child_process');
const fs = require('node:fs');
const path = require('node:path');

const [url, folder] = process.argv.slice(2);
const modules = process.env.NODE_PATH;

function run(tool, ...given) {
  try {
    execFileSync(process.execPath, [path.join(modules, tool), ...given], { cwd: folder, encoding: 'utf8', stdio: 'pipe' });
  } catch (error) {
    process.stderr.write(`${tool}: ${error.stdout}${error.stderr}`);
    process.exit(1);
  }
}

run('@hey-api/openapi-ts/bin/run.js', '-i', `${url}/openapi.json`, '-o', path.join(folder, 'made'), '-c', '@hey-api/client-fetch');
fs.copyFileSync(path.join(__dirname, 'openapi_calls.ts'), path.join(folder, 'calls.ts'));
run('typescript/bin/tsc', '--strict', '--skipLibCheck', '--target', 'es2022', '--module', 'commonjs', '--lib', 'es2022,dom,dom.iterable',
  '--outDir', path.join(folder, 'built'), path.join(folder, 'calls.ts'));
require(path.join(folder, 'built', 'calls.js')).run(url).then((seen) => process.stdout.write(JSON.stringify(seen)));
