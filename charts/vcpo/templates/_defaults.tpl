{{/* Give a template the chart's values where the release has none: `helm upgrade --reuse-values` keeps
the values of an older chart, which lack what is newer. First line of every template:
`include "vcpo.defaults" .`. files/defaults.json is values.yaml. */}}
{{- define "vcpo.defaults" }}
{{- include "vcpo.fill" (list .Values (.Files.Get "files/defaults.json" | fromJson)) }}
{{- end }}

{{/* Keys of these maps are Kubernetes' own, or the user's: null removes one of them. */}}
{{- define "vcpo.passedOn" }}resources podSecurityContext labels{{ end }}

{{- define "vcpo.fill" }}
{{- $values := index . 0 }}
{{- range $name, $default := index . 1 }}
{{- if kindIs "invalid" (index $values $name) }}
{{- $_ := set $values $name $default }}
{{- else if and (kindIs "map" $default) (not (has $name (include "vcpo.passedOn" . | splitList " "))) }}
{{- include "vcpo.fill" (list (index $values $name) $default) }}
{{- end }}
{{- end }}
{{- end }}
