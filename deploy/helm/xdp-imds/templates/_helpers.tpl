{{- define "xdp-imds.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}
{{ .repository }}@{{ .digest }}
{{- else -}}
{{ .repository }}:{{ .tag | default $.Chart.AppVersion }}
{{- end -}}
{{- end -}}
{{- end -}}
{{- define "xdp-imds.config" -}}
{{- $config := dict "records" "/etc/xdp-imds/records.d" "metrics" "0.0.0.0:9177" "token_key" "/etc/xdp-imds/token-key/token.key" -}}
{{- if .Values.kubevirt.enabled -}}
{{- $kubevirt := dict "kubelet" "/kubelet" -}}
{{- if .Values.plugin.enabled -}}
{{- $_ := set $kubevirt "hook" "/var/run/kubevirt/plugins/xdp-imds.sock" -}}
{{- if .Values.plugin.holdSeconds -}}
{{- $_ := set $kubevirt "hold_seconds" .Values.plugin.holdSeconds -}}
{{- end -}}
{{- end -}}
{{- if ne .Values.kubevirt.passt "report" -}}
{{- $_ := set $kubevirt "passt" .Values.kubevirt.passt -}}
{{- end -}}
{{- $_ := set $config "kubevirt" $kubevirt -}}
{{- end -}}
{{- toYaml (mergeOverwrite $config (deepCopy .Values.config)) -}}
{{- end -}}
