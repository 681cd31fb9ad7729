{{/* Rights of the operator in each namespace that it watches. It never creates pods and grants no
rights. */}}
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
  # Clusters that check blockOwnerDeletion require this for owner references to a run.
  verbs: [update]
- apiGroups: [apps]
  resources: [deployments, statefulsets]
  # Server-side apply needs `patch`, and `create` when the object does not exist yet. `get`, here and
  # below, checks before a create whether an object of that name exists and is somebody else's.
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [services, serviceaccounts, configmaps]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [""]
  resources: [secrets]
  # For each run's keys and certificates; `update` renews certificates. A role cannot name Secrets
  # that do not exist yet, so whoever has this account can read and overwrite every Secret whose name
  # he knows, wherever the operator watches: `watchNamespaces` narrows it. Without `list` and `watch`
  # names are not shown.
  verbs: [get, create, update]
- apiGroups: [""]
  resources: [persistentvolumeclaims]
  # No `delete`: checkpoints and models are deleted with their run or by hand.
  verbs: [get, list, watch, create, patch]
- apiGroups: [""]
  resources: [pods]
  # `patch` sets the deletion cost, so that scale-down takes the idlest worker.
  verbs: [list, watch, patch, delete]
- apiGroups: [""]
  resources: [events]
  verbs: [create]
- apiGroups: [policy]
  resources: [poddisruptionbudgets]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [networking.k8s.io]
  resources: [networkpolicies]
  verbs: [get, list, watch, create, patch, delete]
- apiGroups: [monitoring.coreos.com]
  resources: [podmonitors]
  # Not watched, since the cluster may not have this kind.
  verbs: [get, create, patch, delete]
{{- end }}

{{/* Further rights for watching all namespaces. */}}
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
