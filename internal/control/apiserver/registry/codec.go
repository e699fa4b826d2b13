package registry

import (
	"bytes"

	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/runtime/schema"
	"k8s.io/apimachinery/pkg/runtime/serializer/json"
	"k8s.io/apimachinery/pkg/runtime/serializer/versioning"
)

// storageCodec encodes objects of a version as JSON, as the scheme's own codec does, but decodes them in one reading.
func storageCodec(scheme *runtime.Scheme, gv schema.GroupVersion) runtime.Codec {
	s := json.NewSerializerWithOptions(firstFields{}, scheme, scheme, json.SerializerOptions{})
	return versioning.NewDefaultingCodecForScheme(scheme, s, s, gv, runtime.InternalGroupVersioner)
}

// firstFields takes the kind of an object from its first two fields, where our encoder puts it. The library's own reads all of the object.
type firstFields struct{}

// Interpret implements json.MetaFactory.
func (firstFields) Interpret(data []byte) (*schema.GroupVersionKind, error) {
	kind, rest, hasKind := cutString(data, `{"kind":"`)
	version, _, hasVersion := cutString(rest, `,"apiVersion":"`)
	if gv, err := schema.ParseGroupVersion(version); hasKind && hasVersion && err == nil {
		gvk := gv.WithKind(kind)
		return &gvk, nil
	}
	return json.DefaultMetaFactory.Interpret(data)
}

// cutString returns the string that follows a prefix, and what is behind it.
func cutString(data []byte, prefix string) (value string, rest []byte, found bool) {
	data, found = bytes.CutPrefix(data, []byte(prefix))
	text, rest, closed := bytes.Cut(data, []byte(`"`))
	plain := !bytes.ContainsFunc(text, func(r rune) bool { return r <= ' ' || r > '~' || r == '\\' })
	return string(text), rest, found && closed && plain
}
