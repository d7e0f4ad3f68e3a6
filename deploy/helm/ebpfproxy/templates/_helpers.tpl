{{/* The image: by digest if there is one, else by tag. */}}
{{- define "ebpfproxy.image" -}}
{{- if .Values.image.digest -}}
{{ .Values.image.repository }}@{{ .Values.image.digest }}
{{- else -}}
{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}
{{- end -}}
{{- end -}}

{{/* The URL of the API server; "" without a host. */}}
{{- define "ebpfproxy.apiServer" -}}
{{- with .Values.apiServer.host -}}
{{- $host := ternary (printf "[%s]" .) . (and (contains ":" .) (not (hasPrefix "[" .))) -}}
https://{{ $host }}:{{ $.Values.apiServer.port }}
{{- end -}}
{{- end -}}

{{/* The KubeProxyConfiguration. */}}
{{- define "ebpfproxy.config" -}}
{{- $config := dict "apiVersion" "kubeproxy.config.k8s.io/v1alpha1" "kind" "KubeProxyConfiguration" "mode" .Values.mode -}}
{{- if ne .Values.metrics.bindAddress "127.0.0.1:10249" -}}
{{- $_ := set $config "metricsBindAddress" .Values.metrics.bindAddress -}}
{{- end -}}
{{- if .Values.kubeconfig.hostPath -}}
{{- $_ := set $config "clientConnection" (dict "kubeconfig" "/host/kubeconfig") -}}
{{- end -}}
{{- mergeOverwrite $config .Values.config | toYaml -}}
{{- end -}}
