{{/*
Pod of a component: (dict "root" $ "component" C "values" V "args" LIST "env" YAML ["model" KEY] ["gpus" N]).
Gateways have public ports, all others the admin port alone.
*/}}
{{- define "headway.pod" -}}
{{- $root := .root }}
{{- $v := .values }}
{{- $gateway := eq .component "gateway" }}
{{- $names := dict "root" $root "component" .component "model" .model -}}
metadata:
  labels:
    {{- include "headway.podLabels" $names | nindent 4 }}
    {{- with $v.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations:
    checksum/settings: {{ include "headway.settings" $names | sha256sum }}
    {{- with $v.podAnnotations }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
spec:
  serviceAccountName: {{ include "headway.serviceAccount" (dict "root" $root "component" .component "values" $v) }}
  automountServiceAccountToken: false
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ include "headway.grace" (dict "root" $root "values" $v) }}
  securityContext:
    {{- toYaml $root.Values.podSecurityContext | nindent 4 }}
  {{- with include "headway.placement" . | trim }}
  {{- . | nindent 2 }}
  {{- end }}
  containers:
    - name: {{ .component }}
      image: {{ include "headway.image" (dict "root" $root "own" $v.image) }}
      imagePullPolicy: {{ include "headway.pullPolicy" (dict "root" $root "own" $v.image) }}
      command: [headway]
      args:
        {{- toYaml .args | nindent 8 }}
      securityContext:
        {{- toYaml $root.Values.securityContext | nindent 8 }}
      env:
        - {name: HEADWAY_CONFIG, value: /etc/headway/headway.toml}
        - name: HEADWAY_NAME
          valueFrom: {fieldRef: {fieldPath: metadata.name}}
        - name: HEADWAY_BROKER
          valueFrom: {secretKeyRef: {name: {{ include "headway.brokerSecret" $root }}, key: url}}
        - {name: HEADWAY_ADMIN_HOST, value: 0.0.0.0}
        - {name: HEADWAY_ADMIN_PORT, value: "9000"}
        - name: HEADWAY_ADMIN_TOKEN
          valueFrom: {secretKeyRef: {name: {{ include "headway.adminSecret" $root }}, key: token}}
        {{- if $root.Values.tls.existingSecret }}
        - {name: HEADWAY_TLS_CERT, value: /etc/headway-tls/tls.crt}
        - {name: HEADWAY_TLS_KEY, value: /etc/headway-tls/tls.key}
        {{- if $root.Values.tls.clientCertificates }}
        - {name: HEADWAY_TLS_CLIENT_CA, value: /etc/headway-tls/ca.crt}
        {{- end }}
        {{- end }}
        - {name: HOME, value: /tmp}
        {{- with .env }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with $v.extraEnv }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
      {{- with include "headway.envFrom" $v }}
      {{- . | nindent 6 }}
      {{- end }}
      ports:
        {{- if $gateway }}
        - {name: http, containerPort: 8000}
        {{- if $v.grpc.enabled }}
        - {name: grpc, containerPort: 8081}
        {{- end }}
        {{- end }}
        - {name: admin, containerPort: 9000}
      startupProbe:
        {{- include "headway.probe" (dict "root" $root "path" "/livez" "port" "admin") | nindent 8 }}
        periodSeconds: 2
        failureThreshold: 45
      livenessProbe:
        {{- include "headway.probe" (dict "root" $root "path" "/livez" "port" "admin") | nindent 8 }}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 3
      readinessProbe:
        {{- include "headway.probe" (dict "root" $root "path" "/readyz" "port" (ternary "http" "admin" $gateway)) | nindent 8 }}
        periodSeconds: 5
        timeoutSeconds: 2
        failureThreshold: 2
      {{- if $v.preStopSeconds }}
      lifecycle:
        preStop: {sleep: {seconds: {{ $v.preStopSeconds }}}}
      {{- end }}
      resources:
        {{- include "headway.resources" . | nindent 8 }}
      volumeMounts:
        - {name: settings, mountPath: /etc/headway, readOnly: true}
        - {name: tmp, mountPath: /tmp}
        {{- if $root.Values.tls.existingSecret }}
        - {name: tls, mountPath: /etc/headway-tls, readOnly: true}
        {{- end }}
        {{- with $v.extraVolumeMounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
  volumes:
    - name: settings
      configMap:
        name: {{ include "headway.fullname" $root }}
        items: [{key: {{ include "headway.settingsKey" $names }}, path: headway.toml}]
    - name: tmp
      emptyDir: {sizeLimit: {{ $v.tmpSizeLimit }}}
    {{- if $root.Values.tls.existingSecret }}
    - name: tls
      secret: {secretName: {{ $root.Values.tls.existingSecret }}, defaultMode: 0440}
    {{- end }}
    {{- with $v.extraVolumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
{{- end -}}

{{/* Seconds that a drain takes at most: 30, or as long as a request or a batch of any model may take. */}}
{{- define "headway.drain" -}}
{{- $most := 30000.0 }}
{{- $all := list (.Values.settings | default dict) }}
{{- range $model := .Values.models }}
{{- $all = append $all ($model.settings | default dict) }}
{{- end }}
{{- range $own := $all }}
{{- $most = maxf $most ($own.request_timeout_ms | default 0) ($own.gpu_timeout_ms | default 0) }}
{{- end }}
{{- divf $most 1000 | ceil | int -}}
{{- end -}}

{{/* Seconds that a pod has to end: more than it takes to become unknown, to turn clients away, and to drain. */}}
{{- define "headway.grace" -}}
{{- if .values.terminationGracePeriodSeconds -}}
{{- .values.terminationGracePeriodSeconds -}}
{{- else -}}
{{- add .values.preStopSeconds (.values.lameDuckSeconds | default 0) (include "headway.drain" .root) 10 -}}
{{- end -}}
{{- end -}}

{{/* Where pods run: (dict "root" $ "component" C "values" V ["model" KEY]). */}}
{{- define "headway.placement" -}}
{{- $v := .values }}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $v.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $v.runtimeClassName }}
runtimeClassName: {{ . }}
{{- end }}
{{- if and (hasKey $v "topologySpread") $v.topologySpread.enabled }}
topologySpreadConstraints:
  {{- range $key := list "topology.kubernetes.io/zone" "kubernetes.io/hostname" }}
  - topologyKey: {{ $key }}
    maxSkew: 1
    whenUnsatisfiable: {{ ternary $v.topologySpread.whenUnsatisfiable "ScheduleAnyway" (eq $key "topology.kubernetes.io/zone") }}
    matchLabelKeys: [pod-template-hash]
    labelSelector:
      matchLabels:
        {{- include "headway.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "headway.envFrom" -}}
{{- if or .existingSecret .envFrom -}}
envFrom:
  {{- with .existingSecret }}
  - secretRef: {name: {{ . }}}
  {{- end }}
  {{- with .envFrom }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end -}}

{{- define "headway.resources" -}}
{{- $found := deepCopy .values.resources }}
{{- if and .gpus .values.gpuResource }}
{{- $_ := set $found "limits" (merge (dict .values.gpuResource .gpus) ($found.limits | default dict)) }}
{{- end }}
{{- toYaml $found }}
{{- end -}}

{{/* A check of health. Who asks for certificates of clients gets none from the kubelet, which then only sees that the port is open. */}}
{{- define "headway.probe" -}}
{{- $tls := .root.Values.tls -}}
{{- if and $tls.existingSecret $tls.clientCertificates -}}
tcpSocket: {port: {{ .port }}}
{{- else -}}
httpGet: {path: {{ .path }}, port: {{ .port }}, scheme: {{ ternary "HTTPS" "HTTP" (not (not $tls.existingSecret)) }}}
{{- end -}}
{{- end -}}
