// Custom resources of the Gateway API, KEDA and Prometheus' operator, strictly: by the types that were made of their definitions, which know no
// other member, and by their validators, which know the forms of texts.
//
//     custom_resources.js OBJECTS
//
// OBJECTS is a file of JSON with a list of objects. Prints what is wrong, as a list in JSON.
"use strict";
const fs = require("node:fs");
const os = require("node:os");
const path = require("node:path");
const url = require("node:url");
const typescript = require("typescript");

const PACKAGES = {
  "gateway.networking.k8s.io/v1": "@kubernetes-models/gateway-api/gateway.networking.k8s.io/v1",
  "keda.sh/v1alpha1": "@kubernetes-models/keda/keda.sh/v1alpha1",
  "monitoring.coreos.com/v1": "@kubernetes-models/prometheus-operator/monitoring.coreos.com/v1",
};
const objects = JSON.parse(fs.readFileSync(process.argv[2], "utf8"));
const wrong = [];

const folder = fs.mkdtempSync(path.join(os.tmpdir(), "resources-"));
fs.symlinkSync(process.env.NODE_PATH, path.join(folder, "node_modules"));
const lines = objects.flatMap((one, number) => [
  `import type { I${one.kind} as T${number} } from "${PACKAGES[one.apiVersion]}";`,
  `export const object${number}: T${number} = ${JSON.stringify(one)};`,
]);
const file = path.join(folder, "objects.ts");
fs.writeFileSync(file, lines.join("\n"));
const options = { noEmit: true, strict: true, skipLibCheck: true, types: [], moduleResolution: typescript.ModuleResolutionKind.Bundler, module: typescript.ModuleKind.ESNext };
for (const found of typescript.getPreEmitDiagnostics(typescript.createProgram([file], options))) {
  wrong.push(typescript.flattenDiagnosticMessageText(found.messageText, " "));
}
fs.rmSync(folder, { recursive: true });

(async () => {
  for (const one of objects) {
    const module = path.join(process.env.NODE_PATH, PACKAGES[one.apiVersion], `${one.kind}.js`);
    try {
      new ((await import(url.pathToFileURL(module)))[one.kind])(one).validate();
    } catch (error) {
      wrong.push(`${one.kind} ${one.metadata.name}: ${error.message}`);
    }
  }
  console.log(JSON.stringify(wrong));
})();
