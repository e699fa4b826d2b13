package kinds

import (
	"context"

	"k8s.io/apimachinery/pkg/api/meta"
	"k8s.io/apimachinery/pkg/api/meta/table"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/utils/ptr"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// column is one column of the table that kubectl prints, after the name.
type column struct {
	metav1.TableColumnDefinition
	cell func(runtime.Object) any
}

// ConvertToTable returns the table that kubectl prints for an object or a list. The columns are
// those of the markers on the types; a test compares the two.
func (r *Resource) ConvertToTable(_ context.Context, o, opts runtime.Object) (*metav1.Table, error) {
	t := &metav1.Table{}
	if to, ok := opts.(*metav1.TableOptions); !ok || !to.NoHeaders {
		t.ColumnDefinitions = r.headers()
	}
	var err error
	t.Rows, err = table.MetaToTableRow(o, func(item runtime.Object, _ metav1.Object, name, _ string) ([]any, error) {
		cells := make([]any, 0, 1+len(r.columns))
		cells = append(cells, name)
		for _, c := range r.columns {
			cells = append(cells, c.cell(item))
		}
		return cells, nil
	})
	if err != nil {
		return nil, err
	}
	if l, err := meta.ListAccessor(o); err == nil {
		t.ResourceVersion, t.Continue = l.GetResourceVersion(), l.GetContinue()
		t.RemainingItemCount = l.GetRemainingItemCount()
	} else if a, err := meta.CommonAccessor(o); err == nil {
		t.ResourceVersion = a.GetResourceVersion()
	}
	return t, nil
}

func (r *Resource) headers() []metav1.TableColumnDefinition {
	defs := make([]metav1.TableColumnDefinition, 0, 1+len(r.columns))
	defs = append(defs, metav1.TableColumnDefinition{
		Name: "Name", Type: "string", Format: "name", Description: metav1.ObjectMeta{}.SwaggerDoc()["name"],
	})
	for _, c := range r.columns {
		defs = append(defs, c.TableColumnDefinition)
	}
	return defs
}

func text[T runtime.Object](name string, cell func(T) string) column {
	return column{metav1.TableColumnDefinition{Name: name, Type: "string"}, func(o runtime.Object) any { return cell(o.(T)) }}
}

func number[T runtime.Object](name string, cell func(T) int64) column {
	return column{metav1.TableColumnDefinition{Name: name, Type: "integer"}, func(o runtime.Object) any { return cell(o.(T)) }}
}

// positive is number of a field that is left out where it is 0, so that its cell is empty.
func positive[T runtime.Object](name string, cell func(T) int64) column {
	return column{metav1.TableColumnDefinition{Name: name, Type: "integer"}, func(o runtime.Object) any {
		if n := cell(o.(T)); n != 0 {
			return n
		}
		return nil
	}}
}

// ageColumn shows the time since an object was created.
func ageColumn() column {
	return date("Age", func(o metav1.Object) metav1.Time { return o.GetCreationTimestamp() })
}

// date shows how long ago something was.
func date[T any](name string, of func(T) metav1.Time) column {
	return column{metav1.TableColumnDefinition{Name: name, Type: "date"}, func(o runtime.Object) any {
		if at := of(o.(T)); !at.IsZero() {
			return table.ConvertToHumanReadableDateType(at)
		}
		return nil
	}}
}

// wide restricts a column to kubectl's wide output.
func wide(c column) column {
	c.Priority = 1
	return c
}

// ready returns the condition Ready, or an empty one.
func ready(all []metav1.Condition) metav1.Condition {
	return condition(all, agents.ConditionReady)
}

// condition returns the condition of a type, or an empty one.
func condition(all []metav1.Condition, kind string) metav1.Condition {
	return ptr.Deref(meta.FindStatusCondition(all, kind), metav1.Condition{})
}
