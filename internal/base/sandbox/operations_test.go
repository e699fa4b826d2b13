package sandbox

import (
	"fmt"
	"testing"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

func TestOperationsWith(t *testing.T) {
	var none Operations
	create := none.With(agents.OperationStatus{Operation: agents.OperationCreate, Milliseconds: 1})
	bound := create.With(agents.OperationStatus{Operation: agents.OperationBind, Milliseconds: 2})
	again := bound.With(agents.OperationStatus{Operation: agents.OperationCreate, Milliseconds: 3})
	for _, test := range []struct {
		name, want string
		give       Operations
	}{
		{"the first", "[Create 1]", create},
		{"another type", "[Create 1 Bind 2]", bound},
		{"the same type again", "[Bind 2 Create 3]", again},
	} {
		t.Run(test.name, func(t *testing.T) {
			var got []string
			for _, op := range test.give {
				got = append(got, fmt.Sprint(op.Operation, " ", op.Milliseconds))
			}
			if fmt.Sprint(got) != test.want {
				t.Errorf("%v, want %s", got, test.want)
			}
		})
	}
}
