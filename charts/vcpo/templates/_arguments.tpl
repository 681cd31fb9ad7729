{{/* The command line of `python -m vcpo_operator`, one argument per line. */}}
{{- define "vcpo.operatorArguments" -}}
- --learner-image={{ include "vcpo.image" (list . .Values.images.learner) }}
- --rollout-image={{ include "vcpo.image" (list . .Values.images.rollout) }}
- --metrics-listen={{ .Values.listenAddress }}:8080
- --liveness-listen={{ .Values.listenAddress }}:8081
- --pods-listen={{ .Values.listenAddress }}
- --log-format={{ .Values.log.format }}
- --log-level={{ .Values.log.level }}
- --operator-namespace={{ .Release.Namespace }}
{{- with .Values.runs.monitoringNamespaces }}
- --monitoring-namespaces={{ join "," . }}
{{- end }}
{{- with .Values.runs.imagePullSecrets }}
- --image-pull-secrets={{ join "," . }}
{{- end }}
{{- if ne .Values.runs.gpuResourceName "nvidia.com/gpu" }}
- --gpu-resource-name={{ .Values.runs.gpuResourceName }}
{{- end }}
{{- with .Values.watchNamespaces }}
- --namespaces={{ join "," . }}
{{- end }}
{{- if not .Values.metrics.annotations }}
- --no-scrape-annotations
{{- end }}
{{- if .Values.metrics.podMonitor.enabled }}
- --shared-pod-monitor
{{- end }}
{{- with .Values.prometheus.url }}
- --prometheus-url={{ . }}
{{- end }}
{{- range .Values.extraArgs }}
- {{ . | quote }}
{{- end }}
{{- end }}
