{{- define "outrider.name" -}}
{{ .Release.Name | trunc 40 | trimSuffix "-" }}
{{- end }}

{{- define "outrider.labels" -}}
app.kubernetes.io/name: outrider
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "outrider.image" -}}
{{ .Values.image.repository }}:{{ .Values.image.tag }}
{{- end }}

{{- define "outrider.gatewayImage" -}}
{{ .Values.gateway.image | default (printf "%s-gateway:%s" .Values.image.repository .Values.image.tag) }}
{{- end }}

{{- define "outrider.engines" -}}
{{ .Values.engines.address | default (printf "dns://%s-engines.%s.svc:%v" (include "outrider.name" .) .Release.Namespace .Values.engines.port) }}
{{- end }}

{{- define "outrider.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile: {type: RuntimeDefault}
{{- end }}

{{- define "outrider.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{/* Mounts that gateways and engines share; state and cache are volumes of the pod. */}}
{{- define "outrider.mounts" -}}
- {name: settings, mountPath: /etc/outrider, readOnly: true}
- {name: key, mountPath: /run/secrets/outrider, readOnly: true}
- {name: state, mountPath: /var/lib/outrider, subPath: state}
- {name: state, mountPath: /var/cache/outrider, subPath: cache}
- {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "outrider.volumes" -}}
- name: settings
  configMap: {name: {{ include "outrider.name" . }}}
- name: key
  secret: {secretName: {{ .Values.secrets.key }}, defaultMode: 0440}
- name: tmp
  emptyDir: {sizeLimit: 1Gi}
{{- end }}
