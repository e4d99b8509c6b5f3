{{/* A value as TOML has it on one line. Whole numbers stay whole. */}}
{{- define "headway.toml" -}}
{{- if kindIs "map" . -}}
{ {{- range $i, $key := keys . | sortAlpha }}{{ if $i }}, {{ end }}{{ $key | toJson }} = {{ include "headway.toml" (index $ $key) }}{{ end -}} }
{{- else if kindIs "slice" . -}}
[ {{- range $i, $value := . }}{{ if $i }}, {{ end }}{{ include "headway.toml" $value }}{{ end -}} ]
{{- else -}}
{{- toJson . -}}
{{- end -}}
{{- end -}}

{{- define "headway.lines" -}}
{{- range $key := keys . | sortAlpha }}
{{ $key }} = {{ include "headway.toml" (index $ $key) }}
{{- end }}
{{- end -}}

{{/*
The file of settings of a component: (dict "root" $ "component" C ["model" KEY]). Workers get the table of their own model, so that
they restart for no other, and only the controller the numbers that scale.
*/}}
{{- define "headway.settings" -}}
{{- $root := .root }}
{{- $component := .component }}
{{- $only := .model }}
{{- $shared := deepCopy $root.Values.settings }}
{{- if and (eq $component "controller") (include "headway.scales" $root) }}
{{- $most := 1 }}
{{- range $model := $root.Values.models }}
{{- $most = max $most (include "headway.worker" (dict "root" $root "model" $model) | fromYaml).scaling.max }}
{{- end }}
{{- $shared = merge $shared (dict "max_workers" $most) }}
{{- end }}
{{- include "headway.lines" $shared | trim }}
{{- range $key, $model := $root.Values.models }}
{{- if or (not $only) (eq $only $key) }}
{{- $own := dict }}
{{- if and (eq $component "controller") (include "headway.scales" $root) }}
{{- $worker := include "headway.worker" (dict "root" $root "model" $model) | fromYaml }}
{{- $own = dict "min_workers" $worker.scaling.min "max_workers" $worker.scaling.max "scale_policy" $root.Values.scaling.policy "scale_to_zero_after_s" $worker.scaling.zeroAfterSeconds }}
{{- end }}

[models.{{ $model.name | default $key | toJson }}]
{{- include "headway.lines" (merge (deepCopy ($model.settings | default dict)) $own) }}
{{- end }}
{{- end }}
{{- end -}}

{{- define "headway.settingsKey" -}}
{{ .component }}{{ with .model }}-{{ . }}{{ end }}.toml
{{- end -}}
