{{- define "barchan.labels" -}}
app.kubernetes.io/part-of: barchan
app.kubernetes.io/managed-by: {{ .Release.Service }}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.Version | replace "+" "_" | quote }}
{{- end }}

{{- define "barchan.tokenSecret" -}}
{{ default "barchan-token" .Values.tokenSecret }}
{{- end }}

{{- /* goMemLimit RESOURCES: nine tenths of the memory limit, above which Go collects garbage more often. */}}
{{- define "barchan.goMemLimit" -}}
{{- with .limits }}
{{- $memory := toString .memory }}
{{- if regexMatch "^[0-9]+Mi$" $memory }}{{ div (mul (trimSuffix "Mi" $memory | int64) 9) 10 }}MiB{{ end }}
{{- if regexMatch "^[0-9]+Gi$" $memory }}{{ div (mul (trimSuffix "Gi" $memory | int64) 9216) 10 }}MiB{{ end }}
{{- end }}
{{- end }}

{{- /* deployment ROOT ROLE VALUES ARGS: a Deployment of one role. */}}
{{- define "barchan.deployment" -}}
{{- $root := .root }}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ default (printf "barchan-%s" .role) .values.name }}
  namespace: {{ $root.Release.Namespace }}
  labels:
    app.kubernetes.io/name: barchan-{{ .role }}
    {{- include "barchan.labels" $root | nindent 4 }}
spec:
  {{- if not .autoscaled }}
  replicas: {{ .values.replicas }}
  {{- end }}
  selector:
    matchLabels: {app.kubernetes.io/name: barchan-{{ .role }}, app.kubernetes.io/instance: {{ $root.Release.Name }}}
  strategy:
    rollingUpdate: {maxUnavailable: 0, maxSurge: 1}
  template:
    metadata:
      labels:
        app.kubernetes.io/name: barchan-{{ .role }}
        {{- include "barchan.labels" $root | nindent 8 }}
    spec:
      serviceAccountName: barchan-{{ .role }}
      {{- with $root.Values.imagePullSecrets }}
      imagePullSecrets: {{ toJson . }}
      {{- end }}
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        fsGroup: 65532
        seccompProfile: {type: RuntimeDefault}
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: ScheduleAnyway
        labelSelector:
          matchLabels: {app.kubernetes.io/name: barchan-{{ .role }}, app.kubernetes.io/instance: {{ $root.Release.Name }}}
      terminationGracePeriodSeconds: 60
      containers:
      - name: barchan
        image: {{ required "set image to REGISTRY/barchan:TAG; `barchan cluster images REGISTRY` pushes both images and prints these values, `barchan cluster install --registry REGISTRY` does all" $root.Values.image | quote }}
        imagePullPolicy: {{ $root.Values.imagePullPolicy }}
        args: {{ concat .args .values.args | toJson }}
        ports:
        - {name: http, containerPort: 7700}
        - {name: metrics, containerPort: 7790}
        {{- if .peers }}
        - {name: gossip, containerPort: 7701}
        - {name: gossip-udp, containerPort: 7701, protocol: UDP}
        - {name: push, containerPort: 7702}
        {{- end }}
        startupProbe:
          httpGet: {path: /healthz, port: http}
          periodSeconds: 1
          failureThreshold: 60
        livenessProbe:
          httpGet: {path: /healthz, port: http}
          periodSeconds: 10
          timeoutSeconds: 5
          failureThreshold: 6
        readinessProbe:
          httpGet: {path: /readyz, port: http}
          periodSeconds: 2
          timeoutSeconds: 2
        resources: {{ toJson .values.resources }}
        env:
        {{- if .peers }}
        - name: POD_IP
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        {{- end }}
        {{- with include "barchan.goMemLimit" .values.resources }}
        - {name: GOMEMLIMIT, value: {{ . }}}
        {{- end }}
        securityContext:
          allowPrivilegeEscalation: false
          readOnlyRootFilesystem: true
          capabilities: {drop: [ALL]}
        volumeMounts:
        - {name: data, mountPath: /data}
        - {name: token, mountPath: /token, readOnly: true}
      volumes:
      - {name: data, emptyDir: {}}
      - name: token
        secret:
          secretName: {{ include "barchan.tokenSecret" $root }}
          defaultMode: 0440
      {{- range $key := list "nodeSelector" "tolerations" "affinity" }}
      {{- with get $.values $key }}
      {{ $key }}: {{ toJson . }}
      {{- end }}
      {{- end }}
{{- end }}

{{- /* disruptionBudget ROOT ROLE: one Pod of a role at a time leaves. */}}
{{- define "barchan.disruptionBudget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: barchan-{{ .role }}
  namespace: {{ .root.Release.Namespace }}
  labels: {{- include "barchan.labels" .root | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {app.kubernetes.io/name: barchan-{{ .role }}, app.kubernetes.io/instance: {{ .root.Release.Name }}}
{{- end }}
