package ctrd

import (
	"context"
	"fmt"

	"github.com/containerd/containerd/v2/core/containers"
)

// LabelRecord sets a label of a record and leaves all else of it as it is; an empty value takes the
// label away. No record is an errs.ErrNotFound.
func (c *Client) LabelRecord(ctx context.Context, id, label, value string) error {
	ctx, cancel := c.toTheEnd(ctx)
	defer cancel()
	row := containers.Container{ID: id, Labels: map[string]string{}}
	if value != "" {
		row.Labels[label] = value
	}
	_, err := c.api.ContainerService().Update(ctx, row, "labels."+label)
	return kind(fmt.Sprintf("label record of container %s", id), err)
}
