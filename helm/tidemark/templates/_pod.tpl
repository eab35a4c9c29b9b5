{{/* Common parts of all pods. */}}

{{- define "tidemark.podMetadata" -}}
labels:
  {{- include "tidemark.labels" . | nindent 2 }}
  {{- with .values.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $metrics := .root.Values.telemetry.metrics }}
{{- $scraped := and $metrics.enabled $metrics.scrapeAnnotations }}
{{- if or $scraped .values.podAnnotations }}
annotations:
  {{- if $scraped }}
  prometheus.io/scrape: "true"
  prometheus.io/port: {{ $metrics.port | quote }}
  prometheus.io/path: /metrics
  {{- end }}
  {{- with .values.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Pods use neither the Kubernetes API nor the variables with which it describes services. */}}
{{- define "tidemark.podSpec" -}}
serviceAccountName: {{ include "tidemark.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: 10001
  runAsGroup: 10001
  fsGroup: 10001
  fsGroupChangePolicy: OnRootMismatch
  seccompProfile:
    type: RuntimeDefault
{{- with .values.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
affinity:
  {{- if .values.affinity }}
  {{- toYaml .values.affinity | nindent 2 }}
  {{- else }}
  podAntiAffinity:
    preferredDuringSchedulingIgnoredDuringExecution:
      - weight: 100
        podAffinityTerm:
          topologyKey: kubernetes.io/hostname
          labelSelector:
            matchLabels:
              {{- include "tidemark.selectorLabels" . | nindent 14 }}
  {{- end }}
{{- $zones := dict "topologyKey" "topology.kubernetes.io/zone" "maxSkew" 1 "whenUnsatisfiable" "ScheduleAnyway" }}
{{- if hasKey .values "topologySpreadConstraints" }}
topologySpreadConstraints:
  {{- range default (list $zones) .values.topologySpreadConstraints }}
  {{- $selector := dict "matchLabels" (include "tidemark.selectorLabels" $ | fromYaml) }}
  - {{- merge (deepCopy .) (dict "labelSelector" $selector) | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}

{{/* SIGTERM drains a service for the grace period; closing its data and sending its last telemetry
     take a little longer. After that the pod is killed, which loses no data. */}}
{{- define "tidemark.terminationGracePeriodSeconds" -}}
{{ add .Values.shutdownGraceSeconds 20 }}
{{- end }}

{{- define "tidemark.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
runAsNonRoot: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "tidemark.local.ports" -}}
- name: grpc
  containerPort: {{ .values.port }}
{{- with .root.Values.telemetry.metrics }}
{{- if .enabled }}
- name: metrics
  containerPort: {{ .port }}
{{- end }}
{{- end }}
{{- end }}

{{/* Startup: does it respond yet? Storage responds once it has opened its data, which may take long
     after a crash. Liveness: does the process still respond? It does while it drains and while its
     dependencies are unavailable, because a restart would not help. Readiness: are all its services
     serving? Those of a broker are once it has claimed its partitions. */}}
{{- define "tidemark.probes" -}}
startupProbe:
  grpc:
    port: {{ .values.port }}
  periodSeconds: 2
  timeoutSeconds: 2
  failureThreshold: {{ div (add .values.startupSeconds 1) 2 }}
livenessProbe:
  grpc:
    port: {{ .values.port }}
    service: liveness
  periodSeconds: 10
  timeoutSeconds: 5
  failureThreshold: 6
readinessProbe:
  grpc:
    port: {{ .values.port }}
    service: readiness
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: 2
{{- end }}

{{/* The container of a service or job. Takes root, component, values, repository, command, and own:
     the settings that the chart derives. Mounts come last, so that a template can add some. */}}
{{- define "tidemark.container" -}}
- name: {{ .component }}
  image: {{ include "tidemark.image" (dict "root" .root "repository" .repository) }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  command: {{ toJson .command }}
  {{- if .own }}
  env:
    - name: POD_NAME
      valueFrom:
        fieldRef:
          fieldPath: metadata.name
    - name: POD_IP
      valueFrom:
        fieldRef:
          fieldPath: status.podIP
    {{- include "tidemark.env" . | trim | nindent 4 }}
  {{- end }}
  {{- if .values.port }}
  ports:
    {{- include "tidemark.local.ports" . | nindent 4 }}
  {{- end }}
  {{- if .values.startupSeconds }}
  {{- include "tidemark.probes" . | nindent 2 }}
  {{- end }}
  resources:
    {{- toYaml .values.resources | nindent 4 }}
  securityContext:
    {{- include "tidemark.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - name: tmp
      mountPath: /tmp
{{- end }}

{{- define "tidemark.servicePorts" -}}
- name: grpc
  port: {{ .values.port }}
  targetPort: grpc
  appProtocol: grpc
{{- with .root.Values.telemetry.metrics }}
{{- if .enabled }}
- name: metrics
  port: {{ .port }}
  targetPort: metrics
{{- end }}
{{- end }}
{{- end }}

{{/* Metrics are open to everyone by default: they contain no payloads and no queue names. */}}
{{- define "tidemark.metricsIngress" -}}
{{- if .Values.telemetry.metrics.enabled }}
- ports:
    - port: metrics
  {{- with .Values.networkPolicy.metricsClients }}
  from:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}
{{- end }}
