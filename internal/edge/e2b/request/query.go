package request

import (
	"encoding/json"
	"net/http"
	"net/url"
	"time"
)

// Metadata parses the filter of a list: form-encoded pairs whose keys and values are
// percent-encoded once more.
func Metadata(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	pairs, err := url.ParseQuery(text)
	if err != nil {
		return nil, Invalid("metadata: is not of the form key=value&key=value")
	}
	metadata := make(map[string]string, len(pairs))
	for k, values := range pairs {
		key, err := url.PathUnescape(k)
		if err != nil {
			return nil, Invalid("metadata: the key %q is not percent-encoded as it should be", k)
		}
		for _, v := range values {
			value, err := url.PathUnescape(v)
			if err != nil {
				return nil, Invalid("metadata: the value %q is not percent-encoded as it should be", v)
			}
			if was, twice := metadata[key]; twice && was != value {
				return nil, Invalid("metadata: %q cannot have two values", key)
			}
			metadata[key] = value
		}
	}
	return metadata, nil
}

// Seconds converts a number of seconds to a duration, and clamps it.
func Seconds(n int64) time.Duration {
	const most = int64(1<<63-1) / int64(time.Second)
	return time.Duration(max(min(n, most), -most)) * time.Second
}

// Limit checks a given limit; the manager's zero means none.
func Limit(n *int32) (int, error) {
	if n == nil {
		return 0, nil
	}
	if *n < 1 {
		return 0, Invalid("limit: must be 1 or more")
	}
	return int(*n), nil
}

// Deref returns the value of a pointer, and the zero value for nil.
func Deref[T any](p *T) (value T) {
	if p != nil {
		value = *p
	}
	return value
}

// Optional returns nil for the empty text.
func Optional(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}

// Instant reads a Unix time in some unit; nil is the zero time.
func Instant(n *int64, unit time.Duration) time.Time {
	switch {
	case n == nil:
		return time.Time{}
	case unit == time.Millisecond:
		return time.UnixMilli(*n)
	default:
		return time.Unix(*n, 0)
	}
}

// WritePage writes one page of a list. It omits the header of the next page on the last one.
func WritePage(w http.ResponseWriter, items any, next string) error {
	w.Header().Set("Content-Type", "application/json")
	if next != "" {
		w.Header().Set("X-Next-Token", next)
	}
	w.WriteHeader(http.StatusOK)
	return json.NewEncoder(w).Encode(items)
}
