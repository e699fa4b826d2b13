package setting

import (
	"errors"
	"net/netip"
	"testing"
	"time"

	"github.com/spf13/pflag"
	"k8s.io/apimachinery/pkg/api/resource"

	"github.com/barchan-dev/barchan/internal/base/errs"
)

func TestText(t *testing.T) {
	for name, tt := range map[string]struct {
		ptr             any
		kind, text, bad string
	}{
		"string":   {ptr: new(string), kind: "string", text: "a b"},
		"bool":     {ptr: new(bool), kind: "bool", text: "true", bad: "on"},
		"int":      {ptr: new(int), kind: "int", text: "-3", bad: "1.5"},
		"strings":  {ptr: new([]string), kind: "list", text: "a,b"},
		"duration": {ptr: new(time.Duration), kind: "duration", text: "1m30s", bad: "90"},
		"quantity": {ptr: new(resource.Quantity), kind: "quantity", text: "512Mi", bad: "512 MB"},
		"subnet":   {ptr: new(netip.Prefix), kind: "CIDR", text: "fd87::/64", bad: "fd87::"},
		"no":       {ptr: new(netip.MustParsePrefix("fd87::/64")), kind: "CIDR", text: ""},
		"ranges":   {ptr: new([]netip.Prefix), kind: "list", text: "10.0.0.0/8,fd00::/8", bad: "10.0.0.0/8,10.0.0.1"},
		"IPs":      {ptr: new([]netip.Addr), kind: "list", text: "10.0.0.1,fd00::1", bad: "localhost"},
	} {
		t.Run(name, func(t *testing.T) {
			s := Setting{Key: "etcdCAFile", Ptr: tt.ptr}
			if err := s.Set(tt.text); err != nil {
				t.Fatal(err)
			}
			if s.Text() != tt.text || s.Kind() != tt.kind {
				t.Errorf("%s of kind %s, want %s of kind %s", s.Text(), s.Kind(), tt.text, tt.kind)
			}
			if tt.bad == "" {
				return
			}
			err := s.Set(tt.bad)
			if bad, ok := errors.AsType[*Error](err); !ok || bad.Key != s.Key || !errors.Is(err, errs.ErrInvalid) {
				t.Errorf("%q: error %v, want one of the key", tt.bad, err)
			}
		})
	}
}

func TestNames(t *testing.T) {
	s := Setting{Key: "etcdCAFile"}
	if s.Flag() != "etcd-cafile" || s.Env() != "BARCHAN_ETCD_CAFILE" {
		t.Errorf("flag %s, variable %s", s.Flag(), s.Env())
	}
	if s.Variable = "BARCHAN_CA"; s.Env() != "BARCHAN_CA" {
		t.Errorf("variable %s", s.Env())
	}
}

func TestFlags(t *testing.T) {
	var on bool
	names := []string{"a"}
	fs := pflag.NewFlagSet("", pflag.ContinueOnError)
	f := AddFlags(fs, []Setting{{Key: "isOn", Ptr: &on}, {Key: "names", Ptr: &names}, {Key: "other", Ptr: new(int)}})
	if err := fs.Parse([]string{"--is-on", "--names", "b", "--names", "c,d"}); err != nil {
		t.Fatal(err)
	}
	for key, want := range map[string]string{"isOn": "true", "names": "b,c,d", "other": "", "unknown": ""} {
		if got, given := f.Lookup(key); got != want || given != (want != "") {
			t.Errorf("%s is %q, %t; want %q", key, got, given, want)
		}
	}
	if err := fs.Parse([]string{"--other", "x"}); err == nil {
		t.Error("a flag of another type was taken")
	}
}
