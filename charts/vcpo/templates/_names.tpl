{{/* First part of every object's name; 45 characters leave room for the suffixes in a label's 63. */}}
{{- define "vcpo.fullname" -}}
{{- if .Values.fullnameOverride }}
{{- .Values.fullnameOverride | trunc 45 | trimSuffix "-" }}
{{- else if contains .Chart.Name .Release.Name }}
{{- .Release.Name | trunc 45 | trimSuffix "-" }}
{{- else }}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 45 | trimSuffix "-" }}
{{- end }}
{{- end }}

{{/* Name of the Deployment, its roles and its policies. */}}
{{- define "vcpo.operatorName" -}}
{{- printf "%s-operator" (include "vcpo.fullname" .) }}
{{- end }}

{{- define "vcpo.serviceAccountName" -}}
{{- .Values.serviceAccount.name | default (include "vcpo.operatorName" .) }}
{{- end }}

{{/* Labels of selectors; they may never change during the life of a release. The network policies of
runs select the operator by `name` and `component`. */}}
{{- define "vcpo.selectorLabels" -}}
app.kubernetes.io/name: {{ .Chart.Name }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end }}

{{- define "vcpo.labels" -}}
{{ include "vcpo.selectorLabels" . }}
app.kubernetes.io/part-of: vcpo
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name (.Chart.Version | replace "+" "_") }}
{{- end }}

{{/* Full reference of an image: `include "vcpo.image" (list $ .Values.images.operator)`. It uses the
digest, else the tag, else the chart's appVersion as the tag. */}}
{{- define "vcpo.image" -}}
{{- $root := index . 0 }}
{{- $image := index . 1 }}
{{- $repository := list $root.Values.images.registry $image.repository | compact | join "/" }}
{{- if $image.digest }}
{{- printf "%s@%s" $repository $image.digest }}
{{- else }}
{{- printf "%s:%s" $repository ($image.tag | default $root.Chart.AppVersion) }}
{{- end }}
{{- end }}
