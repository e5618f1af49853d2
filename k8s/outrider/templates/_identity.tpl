{{/* What the pods of a part prove themselves with, and ask of others: TLS, tokens, users of Redis. */}}

{{/* "true" where everything is TLS. */}}
{{- define "outrider.tls" -}}
{{- if ne .Values.tls.mode "none" }}true{{ end -}}
{{- end }}

{{/*
The Secret with the certificate of a part: one from outrider.part, or the Valkey for trials. Empty without TLS.
*/}}
{{- define "outrider.tlsSecret" -}}
{{- $where := ternary "redis.trial" (printf "models.%s: %s" .model .part) (eq .component "redis") -}}
{{- if eq .root.Values.tls.mode "secrets" -}}
{{- required (printf "%s.tlsSecret must be given with tls.mode secrets" $where) .settings.tlsSecret -}}
{{- else if .settings.tlsSecret -}}
{{- fail (printf "%s.tlsSecret is of no use with tls.mode %s" $where .root.Values.tls.mode) -}}
{{- else if include "outrider.tls" .root -}}
{{- .name }}-tls
{{- end -}}
{{- end }}

{{/* The Valkey for trials, as parts are. */}}
{{- define "outrider.trial" -}}
name: {{ include "outrider.redisName" . }}
component: redis
model: ""
part: redis
settings:
  {{- toYaml .Values.redis.trial | nindent 2 }}
{{- end }}

{{/* Certificate, key and authorities of a part, as one directory that is replaced as a whole. */}}
{{- define "outrider.tlsVolume" -}}
{{- $from := .root.Values.tls.authorities -}}
{{- if and $from.secret $from.configMap }}{{ fail "tls.authorities: secret and configMap exclude each other" }}{{ end -}}
- name: tls
  projected:
    defaultMode: 0440
    sources:
      - secret:
          name: {{ include "outrider.tlsSecret" . | quote }}
          items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
      - {{ ternary "configMap" "secret" (not (empty $from.configMap)) }}:
          name: {{ $from.configMap | default $from.secret | default (include "outrider.tlsSecret" .) | quote }}
          items: [{key: {{ ternary $from.key "ca.crt" (not (empty (or $from.secret $from.configMap))) | quote }}, path: ca.crt}]
{{- end }}

{{/* The Secret and the key with the password of a part, as YAML; empty without a password. */}}
{{- define "outrider.redisPassword" -}}
{{- $redis := .root.Values.redis -}}
{{- if and $redis.users.secret $redis.passwordSecret.name }}
{{- fail "redis.users.secret and redis.passwordSecret.name exclude each other" }}
{{- end }}
{{- if $redis.users.secret -}}
name: {{ $redis.users.secret | quote }}
key: {{ (index $redis.users .part).key | quote }}
{{- else if $redis.passwordSecret.name -}}
{{- toYaml $redis.passwordSecret }}
{{- end }}
{{- end }}

{{- define "outrider.redisUrl" -}}
{{- $redis := .root.Values.redis -}}
{{- $scheme := ternary "rediss" "redis" (eq (include "outrider.tls" .root) "true") -}}
{{- $url := $redis.url | default (printf "%s://%s:6379/0" $scheme (include "outrider.redisName" .root)) -}}
{{- if $redis.users.secret }}
{{- if contains "@" $url }}{{ fail "redis.url must name no user with redis.users.secret" }}{{ end -}}
{{- $url = replace "://" (printf "://%s@" (index $redis.users .part).name) $url -}}
{{- end }}
{{- $url }}
{{- end }}

{{/* What parts show to Redis: none, part or secret. */}}
{{- define "outrider.redisShown" -}}
{{- $redis := .Values.redis -}}
{{- $from := $redis.clientCertificate.from -}}
{{- if and (ne $from "secret") $redis.clientCertificate.secret }}
{{- fail "redis.clientCertificate.secret needs redis.clientCertificate.from secret" }}
{{- end }}
{{- if and $redis.url (ne $from "none") (not (hasPrefix "rediss://" $redis.url)) }}
{{- fail "redis.clientCertificate.from needs a redis.url of rediss://" }}
{{- end }}
{{- if and (eq $from "part") (not (include "outrider.tls" .)) }}
{{- fail "redis.clientCertificate.from part needs tls.mode secrets or cert-manager" }}
{{- end }}
{{- if $redis.url }}{{ $from }}
{{- else if or (eq $from "secret") $redis.caSecret.name }}
{{- fail "redis.caSecret and redis.clientCertificate.from secret need a redis.url of your own" }}
{{- else }}{{ ternary "part" "none" (eq (include "outrider.tls" .) "true") }}
{{- end }}
{{- end }}

{{/* Flags by which a service proves itself and asks others to. */}}
{{- define "outrider.identityArgs" -}}
{{- $values := .root.Values -}}
{{- $names := $values.tls.names -}}
- {{ printf "--redis-url=%s" (include "outrider.redisUrl" .) | quote }}
{{- if include "outrider.redisPassword" . }}
- "--redis-password-file=/etc/outrider/redis/password"
{{- end }}
{{- $shown := include "outrider.redisShown" .root }}
{{- if $values.redis.caSecret.name }}
- "--redis-ca=/etc/outrider/redis-ca/ca.crt"
{{- else if not $values.redis.url | and (include "outrider.tls" .root) }}
- "--redis-ca=/etc/outrider/tls/ca.crt"
{{- end }}
{{- if ne $shown "none" }}
{{- $at := ternary "/etc/outrider/tls" "/etc/outrider/redis-cert" (eq $shown "part") }}
- "--redis-cert={{ $at }}/tls.crt"
- "--redis-key={{ $at }}/tls.key"
{{- end }}
{{- if include "outrider.tls" .root }}
- "--tls-cert=/etc/outrider/tls/tls.crt"
- "--tls-key=/etc/outrider/tls/tls.key"
- "--tls-ca=/etc/outrider/tls/ca.crt"
{{- if eq .part "coordinator" }}
- {{ printf "--verify-worker-name=%s" $names.verify | quote }}
{{- if eq $values.tls.clientCertificates "none" }}
- "--tls-client-auth=none"
{{- else }}
- {{ printf "--allow-peer=%s" $names.client | quote }}
{{- end }}
{{- else if eq .part "verify" }}
- {{ printf "--draft-worker-name=%s" $names.draft | quote }}
- {{ printf "--allow-peer=%s" $names.coordinator | quote }}
{{- else }}
- {{ printf "--allow-peer=%s" $names.verify | quote }}
{{- end }}
{{- else if eq $values.tls.clientCertificates "none" }}
{{- fail "tls.clientCertificates none needs tls.mode secrets or cert-manager" }}
{{- end }}
{{- if and (eq .part "coordinator") $values.auth.tokensSecret.name }}
- "--tokens=/etc/outrider/tokens/tokens"
{{- end }}
{{- end }}

{{/* Whole directories: what is mounted by subPath never changes. */}}
{{- define "outrider.identityMounts" -}}
{{- $values := .root.Values -}}
{{- if include "outrider.tls" .root }}
- {name: tls, mountPath: /etc/outrider/tls, readOnly: true}
{{- end }}
{{- if and (eq .part "coordinator") $values.auth.tokensSecret.name }}
- {name: tokens, mountPath: /etc/outrider/tokens, readOnly: true}
{{- end }}
{{- if include "outrider.redisPassword" . }}
- {name: redis-password, mountPath: /etc/outrider/redis, readOnly: true}
{{- end }}
{{- if $values.redis.caSecret.name }}
- {name: redis-ca, mountPath: /etc/outrider/redis-ca, readOnly: true}
{{- end }}
{{- if eq (include "outrider.redisShown" .root) "secret" }}
- {name: redis-cert, mountPath: /etc/outrider/redis-cert, readOnly: true}
{{- end }}
{{- end }}

{{- define "outrider.identityVolumes" -}}
{{- $values := .root.Values -}}
{{- if include "outrider.tlsSecret" . }}
{{ include "outrider.tlsVolume" . }}
{{- end }}
{{- if eq .part "coordinator" }}
{{- with $values.auth.tokensSecret.name }}
- name: tokens
  secret:
    secretName: {{ . | quote }}
    defaultMode: 0440
    items: [{key: {{ $values.auth.tokensSecret.key | quote }}, path: tokens}]
{{- end }}
{{- end }}
{{- with include "outrider.redisPassword" . | fromYaml }}
- name: redis-password
  secret:
    secretName: {{ .name | quote }}
    defaultMode: 0440
    items: [{key: {{ .key | quote }}, path: password}]
{{- end }}
{{- with $values.redis.caSecret.name }}
- name: redis-ca
  secret:
    secretName: {{ . | quote }}
    items: [{key: {{ $values.redis.caSecret.key | quote }}, path: ca.crt}]
{{- end }}
{{- if eq (include "outrider.redisShown" .root) "secret" }}
- name: redis-cert
  secret:
    secretName: {{ required "redis.clientCertificate.secret must be given with from secret" $values.redis.clientCertificate.secret | quote }}
    defaultMode: 0440
    items: [{key: tls.crt, path: tls.crt}, {key: tls.key, path: tls.key}]
{{- end }}
{{- end }}

{{/* How a probe asks the health service: the part, "service" and "seconds". The kubelet speaks no TLS. */}}
{{- define "outrider.probe" -}}
{{- if include "outrider.tls" .root -}}
exec:
  command:
    - grpc_health_probe
    - -addr=localhost:{{ .settings.port }}
    {{- with .service }}
    - -service={{ . }}
    {{- end }}
    - -connect-timeout={{ .seconds }}s
    - -rpc-timeout={{ .seconds }}s
    - -tls
    - -tls-ca-cert=/etc/outrider/tls/ca.crt
    - -tls-client-cert=/etc/outrider/tls/tls.crt
    - -tls-client-key=/etc/outrider/tls/tls.key
    - {{ printf "-tls-server-name=%s" (index .root.Values.tls.names .part) | quote }}
{{- else -}}
grpc:
  port: {{ .settings.port }}
  {{- with .service }}
  service: {{ . }}
  {{- end }}
{{- end }}
timeoutSeconds: {{ .seconds }}
{{- end }}

{{/* The users of the Valkey for trials, one entry each, without passwords. */}}
{{- define "outrider.redisAcl" -}}
{{- $users := .Values.redis.users -}}
{{- range .Files.Lines "files/users.acl" }}
{{- if . }}
{{- $words := splitn " " 3 . }}
{{- $part := trimPrefix "outrider-" $words._1 }}
{{ $part }}: user {{ (index $users (trimSuffix "-worker" $part)).name }} {{ $words._2 }}
{{- end }}
{{- end }}
{{- end }}
