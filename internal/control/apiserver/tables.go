package apiserver

import (
	"context"
	"time"

	"k8s.io/apimachinery/pkg/api/meta"
	metav1 "k8s.io/apimachinery/pkg/apis/meta/v1"
	"k8s.io/apimachinery/pkg/runtime"
	"k8s.io/apimachinery/pkg/util/duration"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// tableConvertor makes the tables that kubectl prints, with the columns that the markers on
// the types name; a test compares the two.
type tableConvertor struct{ r *resource }

// ConvertToTable implements rest.TableConvertor.
func (t tableConvertor) ConvertToTable(_ context.Context, o, opts runtime.Object) (*metav1.Table, error) {
	table := &metav1.Table{}
	if to, ok := opts.(*metav1.TableOptions); !ok || !to.NoHeaders {
		table.ColumnDefinitions = t.headers()
	}
	err := each(o, func(item runtime.Object) error {
		a, err := meta.Accessor(item)
		if err != nil {
			return err
		}
		cells := make([]any, 0, 1+len(t.r.columns))
		cells = append(cells, a.GetName())
		for _, c := range t.r.columns {
			cells = append(cells, c.cell(item))
		}
		table.Rows = append(table.Rows, metav1.TableRow{Cells: cells, Object: runtime.RawExtension{Object: item}})
		return nil
	})
	if err != nil {
		return nil, err
	}
	if l, err := meta.ListAccessor(o); err == nil {
		table.ResourceVersion, table.Continue = l.GetResourceVersion(), l.GetContinue()
		table.RemainingItemCount = l.GetRemainingItemCount()
	} else if a, err := meta.CommonAccessor(o); err == nil {
		table.ResourceVersion = a.GetResourceVersion()
	}
	return table, nil
}

func (t tableConvertor) headers() []metav1.TableColumnDefinition {
	defs := make([]metav1.TableColumnDefinition, 0, 1+len(t.r.columns))
	defs = append(defs, metav1.TableColumnDefinition{
		Name: "Name", Type: "string", Format: "name", Description: metav1.ObjectMeta{}.SwaggerDoc()["name"],
	})
	for _, c := range t.r.columns {
		defs = append(defs, c.TableColumnDefinition)
	}
	return defs
}

// each calls f for an object, or for each item if it is a list.
func each(o runtime.Object, f func(runtime.Object) error) error {
	if meta.IsListType(o) {
		return meta.EachListItem(o, f)
	}
	return f(o)
}

func eachObject(o runtime.Object, f func(runtime.Object)) {
	_ = each(o, func(item runtime.Object) error {
		f(item)
		return nil
	})
}

// text, number and age make columns.

func text[T runtime.Object](name string, cell func(T) string) column {
	return column{metav1.TableColumnDefinition{Name: name, Type: "string"}, func(o runtime.Object) any { return cell(o.(T)) }}
}

func number[T runtime.Object](name string, cell func(T) int64) column {
	return column{metav1.TableColumnDefinition{Name: name, Type: "integer"}, func(o runtime.Object) any { return cell(o.(T)) }}
}

// ageColumn tells how long ago an object was created.
func ageColumn() column {
	return column{metav1.TableColumnDefinition{Name: "Age", Type: "date"}, func(o runtime.Object) any {
		a, err := meta.Accessor(o)
		if err != nil {
			return unknownAge
		}
		return age(a.GetCreationTimestamp())
	}}
}

const unknownAge = "<unknown>"

func age(t metav1.Time) string {
	if t.IsZero() {
		return unknownAge
	}
	return duration.HumanDuration(time.Since(t.Time))
}

// wide has a column shown only to who asks for more.
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
	if c := meta.FindStatusCondition(all, kind); c != nil {
		return *c
	}
	return metav1.Condition{}
}
