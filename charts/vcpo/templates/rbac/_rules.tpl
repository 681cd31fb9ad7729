{{/* What the operator may do in each namespace that it watches. It never creates pods or hands out
permissions. */}}
{{- define "vcpo.namespacedRules" -}}
- apiGroups: [vcpo.dev]
  resources: [vcporuns]
  # `delete` is for ttlSecondsAfterFinished.
  verbs: [list, watch, delete]
- apiGroups: [vcpo.dev]
  resources: [vcporuns/status]
  verbs: [patch]
- apiGroups: [vcpo.dev]
  resources: [vcporuns/finalizers]
  # Clusters that check blockOwnerDeletion ask for this before children may name a run as owner.
  verbs: [update]
- apiGroups: [vcpo.dev]
  resources: [vcporolloutscalers]
  # Not `update`: the number in it belongs to whoever scales. `get`, here and below, is for what is
  # to be made and may be there already: somebody else's object is left alone.
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [vcpo.dev]
  resources: [vcporolloutscalers/status]
  verbs: [patch]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  # Server-side apply is `patch`, and `create` when there is no such object yet.
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [apps]
  resources: [deployments/scale]
  verbs: [patch]
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  # Each run's token, by name. Not `list`, `watch` or `patch`: everybody's Secrets are none of ours.
  verbs: [get, create]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  # No `delete`: checkpoints and models go with their run or by hand.
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  # `patch` sets the deletion cost, so that scale-down takes the idlest worker.
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [events]
  # `list` reads the warnings about a learner or pod that does not start, by its uid.
  verbs: [list, create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  # Not watched, since the kind need not exist.
  verbs: [get, create, patch, delete]
{{- end }}

{{/* What watching all namespaces needs besides. */}}
{{- define "vcpo.clusterRules" -}}
- apiGroups: [apiextensions.k8s.io]
  resources: [customresourcedefinitions]
  verbs: [list, watch]
{{- end }}

{{/* Binds the operator's account to its role: `include "vcpo.roleBinding" (list $ kind name)`. */}}
{{- define "vcpo.roleBinding" -}}
{{- $root := index . 0 -}}
roleRef:
  apiGroup: rbac.authorization.k8s.io
  kind: {{ index . 1 }}
  name: {{ index . 2 }}
subjects:
  - kind: ServiceAccount
    name: {{ include "vcpo.serviceAccountName" $root }}
    namespace: {{ $root.Release.Namespace }}
{{- end }}
