{{/* Names, labels, and what the pods of all parts have in common. */}}

{{- define "outrider.name" -}}
{{- default .Chart.Name .Values.nameOverride | trunc 28 | trimSuffix "-" -}}
{{- end }}

{{/*
Short enough for <fullname>-<model>-coordinator and what controllers append. What is cut ends in a hash of the whole:
two releases with long names that begin alike stay apart.
*/}}
{{- define "outrider.fullname" -}}
{{- $chart := default .Chart.Name .Values.nameOverride -}}
{{- $whole := ternary .Release.Name (printf "%s-%s" .Release.Name $chart) (contains $chart .Release.Name) -}}
{{- $name := default $whole .Values.fullnameOverride -}}
{{- if gt (len $name) 28 -}}
{{- $name = printf "%s-%s" ($name | trunc 23 | trimSuffix "-") ($name | sha256sum | trunc 4) -}}
{{- end -}}
{{- if not (regexMatch "^[a-z]([-a-z0-9]*[a-z0-9])?$" $name) -}}
{{- fail (printf "%q can't begin the names of Services: a letter, then letters, digits and dashes; set fullnameOverride" $name) -}}
{{- end -}}
{{- $name -}}
{{- end }}

{{/*
One part of one model: dict "root" $ "model" NAME "part" coordinator|verify|draft.
Gives YAML: name, component, model, settings (the part's values with the model's own over them).
*/}}
{{- define "outrider.part" -}}
{{- $model := index .root.Values.models .model -}}
{{- $settings := mustMergeOverwrite (deepCopy (index .root.Values .part)) (deepCopy (index $model .part | default dict)) -}}
name: {{ printf "%s-%s-%s" (include "outrider.fullname" .root) .model .part | quote }}
component: {{ get (dict "coordinator" "coordinator" "verify" "verify-worker" "draft" "draft-worker") .part }}
model: {{ .model | quote }}
part: {{ .part }}
settings:
  {{- toYaml $settings | nindent 2 }}
{{- end }}

{{/* The parts that a model has: those of "root" and "model", as a YAML list. */}}
{{- define "outrider.parts" -}}
{{- $model := index .root.Values.models .model -}}
- coordinator
- verify
{{- if ne ($model.drafter | default "ngram") "none" }}
- draft
{{- end }}
{{- end }}

{{/* Never changes while a release lives: Deployments and StatefulSets can't change their selectors. */}}
{{- define "outrider.selector" -}}
app.kubernetes.io/name: {{ include "outrider.name" .root | quote }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
app.kubernetes.io/component: {{ .component }}
{{- with .model }}
outrider/model: {{ . | quote }}
{{- end }}
{{- end }}

{{/* Labels of an object: those of the chart over "more", over commonLabels; each key once. */}}
{{- define "outrider.labels" -}}
{{- $own := include "outrider.selector" . | fromYaml -}}
{{- $_ := set $own "helm.sh/chart" (printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_") -}}
{{- $_ := set $own "app.kubernetes.io/version" .root.Chart.AppVersion -}}
{{- $_ := set $own "app.kubernetes.io/managed-by" .root.Release.Service -}}
{{- mustMergeOverwrite (dict) .root.Values.commonLabels (.more | default dict) $own | toYaml -}}
{{- end }}

{{- define "outrider.serviceAccountName" -}}
{{- .settings.serviceAccount.name | default (ternary .name "default" .settings.serviceAccount.create) -}}
{{- end }}

{{- define "outrider.image" -}}
{{- $image := .settings.image -}}
{{- $tag := $image.tag | default .root.Values.image.tag | default .root.Chart.AppVersion -}}
{{- with .root.Values.image.registry }}{{ . }}/{{ end -}}
{{- $image.repository -}}
{{- if $image.digest }}@{{ $image.digest }}{{ else }}:{{ $tag }}{{ end -}}
{{- end }}

{{- define "outrider.redisName" -}}
{{ include "outrider.fullname" . }}-redis
{{- end }}

{{/* The ports of all addresses in redis.url, by which NetworkPolicies are made, as a YAML list. */}}
{{- define "outrider.redisPorts" -}}
{{- $ports := list -}}
{{- range .Values.redis.url | default "redis://valkey:6379" | splitList "," -}}
{{- $ports = append $ports (regexFind ":[0-9]+$" (urlParse .).host | default ":6379" | trimPrefix ":" | int) -}}
{{- end -}}
{{- $ports | uniq | toYaml -}}
{{- end }}

{{/* The strategy of a Deployment; Recreate takes nothing beside. */}}
{{- define "outrider.strategy" -}}
{{- $strategy := .settings.strategy -}}
{{- if eq ($strategy.type | default "RollingUpdate") "Recreate" -}}
type: Recreate
{{- else -}}
{{- $zero := list "0" "0%" -}}
{{- with $strategy.rollingUpdate -}}
{{- if and (has (toString .maxSurge) $zero) (has (toString .maxUnavailable) $zero) -}}
{{- fail (printf "models.%s: %s.strategy.rollingUpdate: maxSurge and maxUnavailable can't both be 0" $.model $.part) -}}
{{- end -}}
{{- end -}}
{{- toYaml $strategy -}}
{{- end -}}
{{- end }}

{{/* Seconds from SIGTERM to the end beyond the drain, by part: last frames, and the step in hand. */}}
{{- define "outrider.stopSeconds" -}}
{{- get (dict "coordinator" 10 "verify" 45 "draft" 20) .part -}}
{{- end }}

{{- define "outrider.graceSeconds" -}}
{{- add (.settings.preStopSeconds | default 0) .root.Values.drainSeconds (include "outrider.stopSeconds" . | int) -}}
{{- end }}

{{/* Flags of a service from a map: true and false are --flag and --no-flag, lists repeat it. */}}
{{- define "outrider.flags" -}}
{{- range $flag, $value := . }}
{{- if kindIs "bool" $value }}
- {{ ternary (printf "--%s" $flag) (printf "--no-%s" $flag) $value | quote }}
{{- else if kindIs "slice" $value }}
{{- range $value }}
- {{ printf "--%s=%s" $flag (kindIs "string" . | ternary . (toJson .)) | quote }}
{{- end }}
{{- else }}
- {{ printf "--%s=%s" $flag (kindIs "string" $value | ternary $value (toJson $value)) | quote }}
{{- end }}
{{- end }}
{{- end }}

{{/* What all parts of a model, and no other ones, have in common in Redis. */}}
{{- define "outrider.group" -}}
{{ .root.Release.Namespace }}/{{ .root.Release.Name }}/{{ .model }}
{{- end }}

{{/* The command line of a service, after `outrider`. */}}
{{- define "outrider.args" -}}
{{- $model := index .root.Values.models .model -}}
{{- $values := .root.Values -}}
- {{ .component }}
{{ include "outrider.identityArgs" . }}
- {{ printf "--host=%s" $values.listenAddress | quote }}
- "--port={{ .settings.port }}"
- "--worker-id=$(POD_NAME)"
- "--group={{ include "outrider.group" . }}"
- "--drain-timeout-s={{ $values.drainSeconds }}"
- "--log-level={{ $values.telemetry.logLevel }}"
{{- with $values.telemetry.metricsPort }}
- "--metrics-port={{ . }}"
{{- end }}
{{- with $values.telemetry.otlpEndpoint }}
- {{ printf "--otlp-endpoint=%s" . | quote }}
{{- end }}
{{- if eq .part "coordinator" }}
- {{ printf "--model=%s" $model.target | quote }}
{{- with $model.servedName }}
- {{ printf "--served-name=%s" . | quote }}
{{- end }}
{{- else }}
- "--advertise-host=$(POD_IP)"
{{- end }}
{{- if eq .part "verify" }}
- {{ printf "--model=%s" $model.target | quote }}
{{- if .settings.ray.enabled }}
- "--tensor-parallel-size={{ mul .settings.ray.hosts .settings.ray.ranksPerHost }}"
- "--ray-address=127.0.0.1:6379"
{{- if and (gt (int .settings.ray.hosts) 1) (not (hasKey .settings.flags "ray-strategy")) }}
- "--ray-strategy=spread"
{{- end }}
{{- end }}
{{- end }}
{{- if eq .part "draft" }}
{{- $drafter := $model.drafter | default "ngram" }}
- "--drafter={{ $drafter }}"
{{- with $model.draftModel }}
- {{ printf "--draft-model=%s" . | quote }}
{{- end }}
{{- if has $drafter (list "model" "hybrid" "early-exit") }}
- {{ printf "--target=%s" $model.target | quote }}
{{- end }}
{{- end }}
{{- include "outrider.flags" .settings.flags }}
{{- end }}

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
# Not every file of a large volume is changed at each start.
fsGroupChangePolicy: OnRootMismatch
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{/* Whether the pods of a part read models: lookups do without. */}}
{{- define "outrider.readsModels" -}}
{{- $model := index .root.Values.models .model -}}
{{- if or (ne .part "draft") (has ($model.drafter | default "ngram") (list "model" "hybrid" "early-exit")) }}true{{ end -}}
{{- end }}

{{- define "outrider.volumeMounts" -}}
{{- $model := index .root.Values.models .model -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /cache}
{{- if and (include "outrider.readsModels" .) (or $model.volume $model.fetch) }}
- {name: models, mountPath: /models, readOnly: true}
{{- end }}
{{- with .settings.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "outrider.volumes" -}}
{{- $model := index .root.Values.models .model -}}
- {name: tmp, emptyDir: {}}
- {name: cache, emptyDir: {}}
{{- if and (include "outrider.readsModels" .) (or $model.volume $model.fetch) }}
- name: models
  {{- toYaml ($model.volume | default (dict "emptyDir" dict)) | nindent 2 }}
{{- end }}
{{- with .settings.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* Probes of the gRPC health service: "" is whether new work is welcome, liveness the engine's progress. */}}
{{- define "outrider.probes" -}}
{{- $liveness := dict "root" .root "part" .part "settings" .settings "service" "liveness" -}}
{{- $readiness := dict "root" .root "part" .part "settings" .settings "service" "" "seconds" 5 -}}
startupProbe:
  {{- include "outrider.probe" (merge (dict "seconds" 5) $liveness) | nindent 2 }}
  periodSeconds: 5
  failureThreshold: {{ div (add .settings.startupSeconds 4) 5 }}
livenessProbe:
  {{- include "outrider.probe" (merge (dict "seconds" 10) $liveness) | nindent 2 }}
  periodSeconds: 10
  failureThreshold: 3
  # What hangs does not drain: its sessions are elsewhere by then, or wait for its end.
  terminationGracePeriodSeconds: {{ add (.settings.preStopSeconds | default 0) 5 }}
readinessProbe:
  {{- include "outrider.probe" $readiness | nindent 2 }}
  periodSeconds: 5
  failureThreshold: 1
{{- end }}

{{- define "outrider.env" -}}
- {name: POD_NAME, valueFrom: {fieldRef: {fieldPath: metadata.name}}}
- {name: POD_IP, valueFrom: {fieldRef: {fieldPath: status.podIP}}}
- {name: HOME, value: /cache}
- {name: NUMBA_CACHE_DIR, value: /cache/numba}
- {name: HF_HUB_OFFLINE, value: "1"}
{{- with .settings.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The container of a service. */}}
{{- define "outrider.container" -}}
- name: {{ .component }}
  image: {{ include "outrider.image" . | quote }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- if and (eq .part "verify") .settings.ray.enabled }}
  command: [/bin/sh, -ec]
  args:
    - {{ include "outrider.rayStart" (dict "how" `--head --port=6379 --system-config='{"worker_niceness":0}'`) }} && exec "$@"
    - outrider
    - outrider
    {{- include "outrider.args" . | nindent 4 }}
  {{- else }}
  command: [outrider]
  args:
    {{- include "outrider.args" . | nindent 4 }}
  {{- end }}
  env:
    {{- include "outrider.env" . | nindent 4 }}
  ports:
    - {name: grpc, containerPort: {{ .settings.port }}}
    {{- with .root.Values.telemetry.metricsPort }}
    - {name: metrics, containerPort: {{ . }}}
    {{- end }}
  {{- include "outrider.probes" . | nindent 2 }}
  {{- with .settings.preStopSeconds }}
  lifecycle:
    preStop:
      sleep: {seconds: {{ . }}}
  {{- end }}
  {{- with .settings.resources }}
  resources:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  securityContext:
    {{- include "outrider.containerSecurity" . | nindent 4 }}
  volumeMounts:
    {{- include "outrider.volumeMounts" . | nindent 4 }}
    {{- include "outrider.identityMounts" . | trim | nindent 4 }}
{{- end }}

{{/* `ray start` on one host of a verify worker; its sockets are in /tmp, which is the pod's own. */}}
{{- define "outrider.rayStart" -}}
ray start {{ .how }} --disable-usage-stats --include-dashboard=false
{{- end }}

{{/* The init container that fetches models. */}}
{{- define "outrider.fetch" -}}
{{- $fetch := (index .root.Values.models .model).fetch -}}
{{- if and $fetch (include "outrider.readsModels" .) -}}
- name: fetch
  {{- toYaml (omit $fetch "volumeMounts" "securityContext" "name") | nindent 2 }}
  securityContext:
    {{- include "outrider.containerSecurity" . | nindent 4 }}
  volumeMounts:
    - {name: models, mountPath: /models}
    - {name: tmp, mountPath: /tmp}
{{- end }}
{{- end }}

{{/* The spec of a pod: the part, "containers" as YAML, and "anonymous" for one that proves itself to nobody. */}}
{{- define "outrider.podSpec" -}}
serviceAccountName: {{ include "outrider.serviceAccountName" . | quote }}
automountServiceAccountToken: false
# Links would be variables such as OUTRIDER_PORT, which are settings of the services.
enableServiceLinks: false
terminationGracePeriodSeconds: {{ include "outrider.graceSeconds" . }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.priorityClassName }}
priorityClassName: {{ . | quote }}
{{- end }}
{{- with .settings.runtimeClassName }}
runtimeClassName: {{ . | quote }}
{{- end }}
securityContext:
  {{- include "outrider.podSecurity" . | nindent 2 }}
{{- with include "outrider.fetch" . }}
initContainers:
  {{- . | nindent 2 }}
{{- end }}
containers:
  {{- .containers | nindent 2 }}
volumes:
  {{- include "outrider.volumes" . | nindent 2 }}
  {{- if not .anonymous }}
  {{- include "outrider.identityVolumes" . | trim | nindent 2 }}
  {{- end }}
{{- with .settings.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .settings.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .settings.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- toYaml .settings.topologySpreadConstraints | nindent 2 }}
{{- else if eq .part "coordinator" }}
topologySpreadConstraints:
  {{- range list "kubernetes.io/hostname" "topology.kubernetes.io/zone" }}
  - maxSkew: 1
    topologyKey: {{ . }}
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "outrider.selector" $ | nindent 8 }}
  {{- end }}
{{- end }}
{{- end }}

{{- define "outrider.podMetadata" -}}
{{- with .settings.podAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
labels:
  {{- mustMergeOverwrite (dict) .settings.podLabels (include "outrider.labels" . | fromYaml) | toYaml | nindent 2 }}
{{- end }}
