{{/* Names and labels. */}}

{{- define "headway.name" -}}
{{- .Values.nameOverride | default .Chart.Name | trunc 39 | trimSuffix "-" -}}
{{- end -}}

{{- define "headway.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 39 | trimSuffix "-" -}}
{{- else -}}
{{- $name := include "headway.name" . -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 39 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Labels by which pods of a component are found: (dict "root" $ "component" C ["model" M]). */}}
{{- define "headway.selector" -}}
app.kubernetes.io/name: {{ include "headway.name" .root }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .component }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- with .model }}
headway/model: {{ . }}
{{- end }}
{{- end -}}

{{- define "headway.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{ include "headway.podLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
{{- end -}}

{{/* Labels of pods. Nothing of them changes with the chart's version, as that would restart Redis and load every model anew. */}}
{{- define "headway.podLabels" -}}
{{ include "headway.selector" . }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: headway
{{- with .root.Values.commonLabels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Label `fleet` of all series, by which one Prometheus tells several fleets apart; empty where nothing gives it to them. */}}
{{- define "headway.fleet" -}}
{{- $m := .Values.monitoring -}}
{{- $own := printf "%s/%s" .Release.Namespace (include "headway.fullname" .) -}}
{{- $m.fleet | default (ternary $own "" (or $m.podMonitor.enabled $m.serviceMonitor.enabled)) -}}
{{- end -}}

{{/* Image of a workload: (dict "root" $ "own" IMAGE). */}}
{{- define "headway.image" -}}
{{- $image := mustMergeOverwrite (deepCopy .root.Values.image) (.own | default dict) -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $image.repository $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $image.repository ($image.tag | default .root.Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{- define "headway.pullPolicy" -}}
{{- (mustMergeOverwrite (deepCopy .root.Values.image) (.own | default dict)).pullPolicy -}}
{{- end -}}

{{/* Service account of a component: (dict "root" $ "component" C "values" V). */}}
{{- define "headway.serviceAccount" -}}
{{- .values.serviceAccount.name | default (printf "%s-%s" (include "headway.fullname" .root) .component) -}}
{{- end -}}

{{- define "headway.brokerSecret" -}}
{{- .Values.broker.existingSecret | default (printf "%s-broker" (include "headway.fullname" .)) -}}
{{- end -}}

{{- define "headway.adminSecret" -}}
{{- .Values.admin.existingSecret | default (printf "%s-admin" (include "headway.fullname" .)) -}}
{{- end -}}

{{/* Values of the workers of a model: (dict "root" $ "model" MODEL). */}}
{{- define "headway.worker" -}}
{{- mustMergeOverwrite (deepCopy .root.Values.worker) (deepCopy (.model.worker | default dict)) | toYaml -}}
{{- end -}}

{{/* Pods that a number of workers takes: (dict "workers" W "slots" S). */}}
{{- define "headway.pods" -}}
{{- divf (float64 .workers) (float64 .slots) | ceil | int -}}
{{- end -}}

{{/* Whether something changes the number of workers. */}}
{{- define "headway.scales" -}}
{{- if ne .Values.scaling.by "none" -}}true{{- end -}}
{{- end -}}
