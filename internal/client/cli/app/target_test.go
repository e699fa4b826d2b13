package app

import (
	"testing"
)

func TestDialable(t *testing.T) {
	for _, c := range []struct{ got, want string }{
		{Dialable("0.0.0.0:80"), "127.0.0.1:80"},
		{Dialable("[::]:80"), "127.0.0.1:80"},
		{Dialable(":80"), "127.0.0.1:80"},
		{Dialable("10.0.0.1:80"), "10.0.0.1:80"},
	} {
		if c.got != c.want {
			t.Errorf("got %q, want %q", c.got, c.want)
		}
	}
}
