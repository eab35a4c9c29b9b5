{{/* The environment of a container: settings that the chart derives (own), then the settings of all
     services, overridden by those of the service, then settings from Secrets. */}}

{{- define "tidemark.env" -}}
{{- $own := .own -}}
{{- $settings := dict -}}
{{- $secrets := dict -}}
{{- range $section := list .root.Values .values -}}
{{- range $name, $value := $section.settings }}{{ $_ := set $settings $name $value }}{{ end -}}
{{- range $name, $value := $section.secretSettings }}{{ $_ := set $secrets $name $value }}{{ end -}}
{{- end -}}
{{- range $name := concat (keys $settings) (keys $secrets) | sortAlpha }}
{{- if hasKey $own $name }}
{{- fail (printf "%s is set by the chart and cannot be set under settings or secretSettings; see the comments in values.yaml for the value that it is derived from" $name) }}
{{- end }}
{{- if and (hasKey $settings $name) (hasKey $secrets $name) }}
{{- fail (printf "%s is set twice: under settings and under secretSettings" $name) }}
{{- end }}
{{- end }}
{{- $ownSecrets := default dict .ownSecrets }}
{{- range $name, $value := $own }}
{{- if not (hasKey $ownSecrets $name) }}
- name: {{ $name }}
  value: {{ include "tidemark.text" $value | quote }}
{{- end }}
{{- end }}
{{- range $name, $value := $settings }}
- name: {{ $name }}
  value: {{ include "tidemark.text" $value | quote }}
{{- end }}
{{- range $name, $secret := merge (dict) $secrets $ownSecrets }}
- name: {{ $name }}
  valueFrom:
    secretKeyRef:
      name: {{ $secret.name }}
      key: {{ $secret.key }}
{{- end }}
{{- end }}

{{/* Helm keeps numbers as floats, which print as 1e+06. */}}
{{- define "tidemark.text" -}}
{{ kindIs "float64" . | ternary (. | int64) . }}
{{- end }}

{{/* The bytes of a quantity of Kubernetes, such as 512Mi. */}}
{{- define "tidemark.bytes" -}}
{{- $text := toString . -}}
{{- $suffix := regexFind "[A-Za-z]+$" $text -}}
{{- $factors := dict "" 1.0 "m" 0.001 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024.0 "Mi" 1048576.0 "Gi" 1073741824.0 "Ti" 1099511627776.0 "Pi" 1125899906842624.0 -}}
{{- mulf (trimSuffix $suffix $text | float64) (get $factors $suffix) -}}
{{- end }}

{{/* The settings that the chart derives for every service, as YAML. */}}
{{- define "tidemark.commonSettings" -}}
{{- $values := .root.Values -}}
TIDEMARK_CLUSTER_ID: {{ $values.cluster.id | quote }}
TIDEMARK_PARTITIONS: {{ include "tidemark.text" $values.cluster.partitions | quote }}
TIDEMARK_SHUTDOWN_GRACE_MS: {{ mul $values.shutdownGraceSeconds 1000 | quote }}
{{- if $values.telemetry.metrics.enabled }}
TIDEMARK_METRICS_LISTEN: {{ include "tidemark.listen" (dict "root" .root "port" $values.telemetry.metrics.port) | quote }}
{{- end }}
{{- with $values.telemetry.otlpEndpoint }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ . | quote }}
{{- end }}
{{- end }}

{{/* The setting of the registry, and the key of the Secret that takes its place, as YAML. */}}
{{- define "tidemark.registrySettings" -}}
TIDEMARK_REGISTRY_URL: {{ .Values.registry.url | quote }}
{{- end }}

{{- define "tidemark.registrySecrets" -}}
{{- with .Values.registry.secret }}
{{- if .name }}
TIDEMARK_REGISTRY_URL: {{ dict "name" .name "key" .key | toJson }}
{{- end }}
{{- end }}
{{- end }}
