package e2b

import (
	"net/url"
	"time"
)

// parseMetadata parses the filter of a list: form-encoded pairs whose keys and values are
// percent-encoded once more.
func parseMetadata(text string) (map[string]string, error) {
	if text == "" {
		return nil, nil
	}
	pairs, err := url.ParseQuery(text)
	if err != nil {
		return nil, invalid("metadata: is not of the form key=value&key=value")
	}
	metadata := make(map[string]string, len(pairs))
	for k, values := range pairs {
		key, err := url.PathUnescape(k)
		if err != nil {
			return nil, invalid("metadata: the key %q is not percent-encoded as it should be", k)
		}
		for _, v := range values {
			value, err := url.PathUnescape(v)
			if err != nil {
				return nil, invalid("metadata: the value %q is not percent-encoded as it should be", v)
			}
			if was, twice := metadata[key]; twice && was != value {
				return nil, invalid("metadata: %q cannot have two values", key)
			}
			metadata[key] = value
		}
	}
	return metadata, nil
}

// seconds converts a number of seconds to a duration, and clamps it.
func seconds(n int64) time.Duration {
	const most = int64(1<<63-1) / int64(time.Second)
	return time.Duration(max(min(n, most), -most)) * time.Second
}

// limitOf checks a given limit; the manager's zero means none.
func limitOf(n *int32) (int, error) {
	if n == nil {
		return 0, nil
	}
	if *n < 1 {
		return 0, invalid("limit: must be 1 or more")
	}
	return int(*n), nil
}

func deref[T any](p *T) (value T) {
	if p != nil {
		value = *p
	}
	return value
}

// optional returns nil for the empty text.
func optional(text string) *string {
	if text == "" {
		return nil
	}
	return &text
}
