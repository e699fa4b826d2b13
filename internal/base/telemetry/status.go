package telemetry

import "net/http"

// StatusRecorder is a response whose status is recorded. A stream that ends in an error has begun with 200.
type StatusRecorder struct {
	http.ResponseWriter
	// Status is zero until the response begins.
	Status int
}

// WriteHeader implements http.ResponseWriter.
func (r *StatusRecorder) WriteHeader(status int) {
	if r.Status == 0 {
		r.Status = status
	}
	r.ResponseWriter.WriteHeader(status)
}

// Write implements http.ResponseWriter.
func (r *StatusRecorder) Write(b []byte) (int, error) {
	if r.Status == 0 {
		r.Status = http.StatusOK
	}
	return r.ResponseWriter.Write(b)
}

// Unwrap serves http.ResponseController.
func (r *StatusRecorder) Unwrap() http.ResponseWriter { return r.ResponseWriter }
