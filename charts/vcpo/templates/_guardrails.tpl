{{/* Refuse combinations of values that install but do not work; each message names the cure. */}}
{{- define "vcpo.guardrails" -}}
{{- if and (not .Values.serviceAccount.create) (not .Values.serviceAccount.name) }}
{{- fail "serviceAccount.create is false and serviceAccount.name is empty: the operator would run as the namespace's default account. Cure: name an existing account in serviceAccount.name" }}
{{- end }}
{{- if and .Values.metrics.serviceMonitor.enabled (not .Values.metrics.service.enabled) }}
{{- fail "metrics.serviceMonitor.enabled is true and metrics.service.enabled is false: there would be nothing to scrape. Cure: set metrics.service.enabled=true" }}
{{- end }}
{{- if and .Values.crds.enabled (not (.Files.Get "files/run.crd.yaml")) }}
{{- fail "files/run.crd.yaml is missing from the chart. Cure: python -m vcpo_operator.crd > charts/vcpo/files/run.crd.yaml" }}
{{- end }}
{{- range $name := list "operator" "learner" "rollout" }}
{{- $image := index $.Values.images $name }}
{{- if and (eq $image.tag "latest") (not $image.digest) }}
{{- fail (printf "images.%s.tag is 'latest', which can name another image tomorrow. Cure: give a version, or images.%s.digest" $name $name) }}
{{- end }}
{{- end }}
{{- end }}
