package gc

import (
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/client-go/tools/cache"
)

// feed receives the objects of one kind; it implements cache.ReflectorStore.
type feed struct {
	put, remove func(metav1.Object)
	replace     func([]metav1.Object)
}

// reflector lists and watches a kind into f.
func (k *Kind) reflector(f feed) *cache.Reflector {
	return cache.NewReflectorWithOptions(k.Source, nil, f, cache.ReflectorOptions{Name: "gc " + k.String(), TypeDescription: k.String()})
}

func (f feed) Add(obj any) error { return f.Update(obj) }

func (f feed) Update(obj any) error {
	f.put(obj.(metav1.Object))
	return nil
}

func (f feed) Delete(obj any) error {
	f.remove(obj.(metav1.Object))
	return nil
}

func (f feed) Replace(list []any, _ string) error {
	all := make([]metav1.Object, 0, len(list))
	for _, obj := range list {
		all = append(all, obj.(metav1.Object))
	}
	f.replace(all)
	return nil
}

func (f feed) Resync() error { return nil }
