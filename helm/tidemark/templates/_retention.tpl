{{/* Retention and eviction: settings of the jobs, and the CronJob of one job. */}}

{{/* The settings that the chart derives, as YAML. With a local master, Spark stays inside its pod. With
     an external cluster, executors must reach the driver at ports that a policy can name. */}}
{{- define "tidemark.retentionSettings" -}}
{{- $spark := .root.Values.retention.spark -}}
{{- $options := dict "spark.driver.host" "127.0.0.1" "spark.driver.bindAddress" "127.0.0.1" -}}
{{- if include "tidemark.sparkIsForeign" .root -}}
{{- $options = dict "spark.driver.host" "$(POD_IP)" "spark.driver.bindAddress" "$(POD_IP)" "spark.driver.port" $spark.driverPort "spark.driver.blockManager.port" $spark.blockManagerPort -}}
{{- end -}}
{{- range $name, $value := $spark.options }}{{ $_ := set $options $name $value }}{{ end -}}
{{- $pairs := list -}}
{{- range $name, $value := $options }}{{ $pairs = append $pairs (printf "%s=%s" $name (include "tidemark.text" $value)) }}{{ end -}}
{{ include "tidemark.commonSettings" . }}
TIDEMARK_STORAGE_ADDRESSES: {{ include "tidemark.storageAddresses" .root | quote }}
TIDEMARK_SPARK_MASTER: {{ $spark.master | quote }}
TIDEMARK_SPARK_OPTIONS: {{ join "," $pairs | quote }}
{{- end }}

{{- define "tidemark.sparkIsForeign" -}}
{{- if not (hasPrefix "local" .Values.retention.spark.master) }}true{{ end -}}
{{- end }}

{{/* Takes root, component, values and job. */}}
{{- define "tidemark.passCronJob" -}}
{{- $cron := index .values.cronJobs .job -}}
{{- $own := omit (include "tidemark.retentionSettings" . | fromYaml) "TIDEMARK_METRICS_LISTEN" -}}
{{- $values := omit .values "port" "startupSeconds" -}}
{{- $command := list "python" "-m" "spark_batch" "run" .job -}}
apiVersion: batch/v1
kind: CronJob
metadata:
  name: {{ include "tidemark.fullname" .root }}-{{ .job }}-pass
  labels:
    {{- include "tidemark.labels" . | nindent 4 }}
spec:
  schedule: {{ $cron.schedule | quote }}
  concurrencyPolicy: Forbid
  startingDeadlineSeconds: 300
  successfulJobsHistoryLimit: 1
  failedJobsHistoryLimit: 3
  jobTemplate:
    spec:
      # A failed pass is not retried: the next one does the rest.
      backoffLimit: 0
      activeDeadlineSeconds: {{ $cron.activeDeadlineSeconds }}
      template:
        metadata:
          labels:
            {{- include "tidemark.labels" . | nindent 12 }}
        spec:
          {{- include "tidemark.podSpec" . | nindent 10 }}
          terminationGracePeriodSeconds: {{ include "tidemark.terminationGracePeriodSeconds" .root }}
          restartPolicy: Never
          containers:
            {{- include "tidemark.container" (dict "root" .root "component" .component "values" $values "repository" .root.Values.image.sparkRepository "command" $command "own" $own) | nindent 12 }}
          volumes:
            - name: tmp
              emptyDir: {}
{{- end }}
