{{/* Annotations of an alert: `include "vcpo.alertAnnotations" (list $settings $annotations)`, as YAML. The
paths of runbook and panel become addresses where the values have the first part of them. */}}
{{- define "vcpo.alertAnnotations" -}}
{{- $settings := index . 0 }}
{{- $annotations := index . 1 }}
{{- with $settings.runbookBaseUrl }}
{{- $anchor := trimPrefix "docs/runbooks.md" $annotations.runbook_url }}
{{- $annotations = merge (dict "runbook_url" (print . $anchor)) $annotations }}
{{- end }}
{{- with $settings.grafanaUrl }}
{{- $annotations = merge (dict "dashboard_url" (print (trimSuffix "/" .) $annotations.dashboard_url)) $annotations }}
{{- end }}
{{- toYaml $annotations }}
{{- end }}

{{/* Groups of files/rules.yaml as YAML, with the thresholds of the values and without disabled alerts. */}}
{{- define "vcpo.ruleGroups" -}}
{{- $settings := .Values.metrics.prometheusRule }}
{{- $text := .Files.Get "files/rules.yaml" }}
{{- range $name, $value := $settings.thresholds }}
{{- $text = regexReplaceAll (printf `[0-9.]+([,)]* +# threshold %s)\b` $name) $text (printf "%v${1}" $value) }}
{{- end }}
{{- $groups := list }}
{{- range $group := (fromYaml $text).groups }}
{{- $rules := list }}
{{- range $group.rules }}
{{- if not .alert }}
{{- $rules = append $rules . }}
{{- else if not (has .alert $settings.disabled) }}
{{- $annotations := include "vcpo.alertAnnotations" (list $settings .annotations) | fromYaml }}
{{- $rules = append $rules (merge (dict "annotations" $annotations) .) }}
{{- end }}
{{- end }}
{{- with $rules }}
{{- $groups = append $groups (merge (dict "rules" .) (omit $group "rules")) }}
{{- end }}
{{- end }}
{{- toYaml $groups }}
{{- end }}
