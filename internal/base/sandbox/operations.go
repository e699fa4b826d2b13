package sandbox

import (
	"slices"

	agents "github.com/barchan-dev/barchan/api/agents/v1beta1"
)

// Operations are the last operations of each type on a sandbox, oldest first. They are never changed in place.
type Operations []agents.OperationStatus

// With returns the operations with a new one in the place of the last of its type.
func (all Operations) With(op agents.OperationStatus) Operations {
	rest := slices.DeleteFunc(slices.Clone(all), func(o agents.OperationStatus) bool { return o.Operation == op.Operation })
	return append(rest, op)
}
