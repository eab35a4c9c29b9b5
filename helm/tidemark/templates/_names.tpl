{{/* Names, labels and addresses. Templates of a component take a dict: root (the context of the
     chart), component (its name) and values (its section). */}}

{{- define "tidemark.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 42 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 42 | trimSuffix "-" -}}
{{- end -}}
{{- end }}

{{- define "tidemark.name" -}}
{{ include "tidemark.fullname" .root }}-{{ .component }}
{{- end }}

{{/* An upgrade must not change these: selectors of Deployments and StatefulSets are immutable. */}}
{{- define "tidemark.selectorLabels" -}}
app.kubernetes.io/name: {{ .root.Chart.Name }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .component }}
{{- end }}

{{- define "tidemark.labels" -}}
{{ include "tidemark.selectorLabels" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
app.kubernetes.io/part-of: tidemark
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end }}

{{- define "tidemark.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tidemark.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}

{{/* Address of a service: that of its Service, which outlives its pods. */}}
{{- define "tidemark.address" -}}
{{ include "tidemark.name" . }}:{{ .values.port }}
{{- end }}

{{/* "true" if storage has no volumes: any node can hold any partition. Takes the context of the chart. */}}
{{- define "tidemark.storageIsShared" -}}
{{- if eq .Values.storage.engine "redis" }}true{{ end -}}
{{- end }}

{{/* "true" if nodes of storage are called one by one, by the names of their pods. */}}
{{- define "tidemark.storageIsNamed" -}}
{{- if and (gt (int .Values.storage.replicas) 1) (not (include "tidemark.storageIsShared" .)) }}true{{ end -}}
{{- end }}

{{/* Addresses of all storage nodes. Of several with volumes, each pod has its own, by the name that the
     headless Service gives it. Takes the context of the chart. */}}
{{- define "tidemark.storageAddresses" -}}
{{- $it := dict "root" . "component" "storage" "values" .Values.storage -}}
{{- if include "tidemark.storageIsNamed" . -}}
{{- $addresses := list -}}
{{- range $number := until (int .Values.storage.replicas) -}}
{{- $pod := printf "%s-%d" (include "tidemark.name" $it) $number -}}
{{- $addresses = append $addresses (include "tidemark.storagePodAddress" (dict "root" $ "pod" $pod)) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- else -}}
{{- include "tidemark.address" $it -}}
{{- end -}}
{{- end }}

{{/* Takes root and pod, the name of a pod of storage. */}}
{{- define "tidemark.storagePodAddress" -}}
{{- $it := dict "root" .root "component" "storage" -}}
{{ .pod }}.{{ include "tidemark.name" $it }}-pods:{{ .root.Values.storage.port }}
{{- end }}

{{/* "true" if there is a registry. */}}
{{- define "tidemark.hasRegistry" -}}
{{- if or .Values.registry.url .Values.registry.secret.name }}true{{ end -}}
{{- end }}

{{/* Of services whose members find each other in the registry: RollingUpdate if there is one, or Recreate.
     Takes root and strategy, which is one of them or "". */}}
{{- define "tidemark.updateStrategy" -}}
{{- $type := default (eq (include "tidemark.hasRegistry" .root) "true" | ternary "RollingUpdate" "Recreate") .strategy -}}
type: {{ $type }}
{{- if eq $type "RollingUpdate" }}
# A member hands its partitions over before it ends; the new one is there by then.
rollingUpdate:
  maxSurge: 1
  maxUnavailable: 0
{{- end }}
{{- end }}

{{/* Services listen on loopback by default. Takes root and port. */}}
{{- define "tidemark.listen" -}}
{{ eq .root.Values.ipFamily "IPv6" | ternary "[::]" "0.0.0.0" }}:{{ .port }}
{{- end }}

{{/* The address that a pod advertises; requires POD_IP in its environment. */}}
{{- define "tidemark.advertise" -}}
{{ eq .root.Values.ipFamily "IPv6" | ternary "[$(POD_IP)]" "$(POD_IP)" }}:{{ .values.port }}
{{- end }}

{{/* Takes root and repository. */}}
{{- define "tidemark.image" -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{ .repository }}:{{ default .root.Chart.AppVersion .root.Values.image.tag }}
{{- end }}
