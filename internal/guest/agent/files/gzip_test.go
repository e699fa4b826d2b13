package files

import (
	"net/http"
	"strings"
	"testing"
)

func FuzzWantsGzip(f *testing.F) {
	for _, s := range []string{"gzip, deflate, br", "gzip;q=0.5,identity;q=0", "*;q=0", ";;,,q="} {
		f.Add(s)
	}
	f.Fuzz(func(t *testing.T, header string) {
		zip, err := wantsGzip(http.Header{"Accept-Encoding": {header}})
		if zip && (err != nil || !strings.Contains(strings.ToLower(header), "gzip") && !strings.Contains(header, "*")) {
			t.Errorf("%q: gzip, %v", header, err)
		}
	})
}
