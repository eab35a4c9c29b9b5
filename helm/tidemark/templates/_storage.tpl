{{/* What storage has in common as a StatefulSet and as a Deployment. */}}

{{/* The settings that the chart derives for every engine, as YAML. */}}
{{- define "tidemark.storageSettings" -}}
{{- $root := .root -}}
{{- $lifecycle := dict "root" $root "component" "lifecycle" "values" $root.Values.lifecycle -}}
{{ include "tidemark.commonSettings" . }}
TIDEMARK_STORAGE_ENGINE: {{ $root.Values.storage.engine }}
TIDEMARK_STORAGE_LISTEN: {{ include "tidemark.listen" (dict "root" $root "port" .values.port) | quote }}
{{- if include "tidemark.storageIsNamed" $root }}
TIDEMARK_STORAGE_ADVERTISE: {{ include "tidemark.storagePodAddress" (dict "root" $root "pod" "$(POD_NAME)") | quote }}
{{- else }}
TIDEMARK_STORAGE_ADVERTISE: {{ include "tidemark.advertise" . | quote }}
{{- end }}
TIDEMARK_STORAGE_ADDRESSES: {{ include "tidemark.storageAddresses" $root | quote }}
TIDEMARK_LIFECYCLE_ADDRESS: {{ include "tidemark.address" $lifecycle | quote }}
TIDEMARK_STORAGE_DATA_DIR: {{ eq $root.Values.storage.engine "redis" | ternary "/tmp/tidemark" "/var/lib/tidemark/data" }}
{{- end }}

{{/* The settings of the engine redis, as YAML; "" where a Secret takes its place. */}}
{{- define "tidemark.redisSettings" -}}
{{- $redis := .Values.storage.redis -}}
TIDEMARK_REDIS_URL: {{ $redis.url | quote }}
TIDEMARK_REDIS_USERNAME: ""
TIDEMARK_REDIS_PASSWORD: ""
TIDEMARK_REDIS_DURABILITY: {{ $redis.durability }}
{{- range $name, $key := dict "CA" "caKey" "CERT" "certKey" "KEY" "keyKey" }}
{{- $file := "" }}
{{- with and $redis.tls.secretName (get $redis.tls $key) }}{{ $file = printf "/etc/tidemark/redis/%s" . }}{{ end }}
TIDEMARK_REDIS_{{ $name }}_FILE: {{ $file | quote }}
{{- end }}
{{- end }}

{{/* Which of them come from which key of a Secret, as YAML. */}}
{{- define "tidemark.redisSecrets" -}}
{{- $redis := .Values.storage.redis -}}
{{- if $redis.secret.name }}
{{- $keys := dict "USERNAME" $redis.secret.usernameKey "PASSWORD" $redis.secret.passwordKey }}
{{- if not $redis.url }}{{ $_ := set $keys "URL" $redis.secret.urlKey }}{{ end }}
{{- range $name, $key := $keys }}
{{- if $key }}
TIDEMARK_REDIS_{{ $name }}: {{ dict "name" $redis.secret.name "key" $key | toJson }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}
