package ctrd

import (
	"context"
	"errors"
	"fmt"

	"github.com/containerd/containerd/v2/core/containers"
	"github.com/containerd/errdefs"
	"github.com/containerd/typeurl/v2"
	"google.golang.org/protobuf/types/known/anypb"
)

// Container is the metadata of one container.
type Container struct {
	// ID is unique in the namespace.
	ID string
	// Image is the name of its image, Runtime its runtime.
	Image, Runtime string
	// Snapshot is the key of its root filesystem; the container keeps it from collection.
	Snapshot string
	// Labels are the caller's: sandbox, revision, address.
	Labels map[string]string
}

// CreateContainer writes a container's metadata, replacing one of the same ID.
func (c *Client) CreateContainer(ctx context.Context, r Container) error {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	row := containers.Container{
		ID: r.ID, Image: r.Image, Labels: r.Labels, Snapshotter: snapshotter, SnapshotKey: r.Snapshot,
		Runtime: containers.RuntimeInfo{Name: r.Runtime}, Spec: emptySpec(),
	}
	_, err := c.api.ContainerService().Create(ctx, row)
	if errdefs.IsAlreadyExists(err) {
		err = c.api.ContainerService().Delete(ctx, r.ID)
		if err == nil || errdefs.IsNotFound(err) {
			_, err = c.api.ContainerService().Create(ctx, row)
		}
	}
	return kind(fmt.Sprintf("record container %s", r.ID), err)
}

// emptySpec satisfies containerd, which requires one; the real spec is in the bundle.
func emptySpec() typeurl.Any {
	return &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: []byte("{}")}
}

// RemoveContainer removes a container's metadata. A missing one is success.
func (c *Client) RemoveContainer(ctx context.Context, id string) error {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	err := c.api.ContainerService().Delete(ctx, id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return kind(fmt.Sprintf("remove record of container %s", id), err)
}

// Records lists all containers.
func (c *Client) Records(ctx context.Context) ([]Container, error) { return c.list(ctx) }

// RecordsWith lists the containers with a label value, which is cheaper than all.
func (c *Client) RecordsWith(ctx context.Context, label, value string) ([]Container, error) {
	return c.list(ctx, fmt.Sprintf("labels.%q==%q", label, value))
}

func (c *Client) list(ctx context.Context, filters ...string) ([]Container, error) {
	ctx, cancel := context.WithTimeout(ctx, c.callTimeout)
	defer cancel()
	rows, err := c.api.ContainerService().List(ctx, filters...)
	if err != nil {
		return nil, kind("list records of containers", err)
	}
	records := make([]Container, 0, len(rows))
	for _, row := range rows {
		records = append(records, Container{
			ID: row.ID, Image: row.Image, Runtime: row.Runtime.Name, Snapshot: row.SnapshotKey, Labels: row.Labels,
		})
	}
	return records, nil
}

// Purge removes all containers, snapshots, writable and committed, and images of the namespace, and
// the namespace, to remove an instance from a shared containerd.
func (c *Client) Purge(ctx context.Context) error {
	records, err := c.Records(ctx)
	if err != nil {
		return err
	}
	var failures []error
	for _, r := range records {
		failures = append(failures, c.RemoveContainer(ctx, r.ID))
	}
	keys, err := c.Snapshots(ctx)
	failures = append(failures, err)
	for _, key := range keys {
		failures = append(failures, c.RemoveSnapshot(ctx, key))
	}
	committed, err := c.Committed(ctx)
	failures = append(failures, err)
	for _, one := range committed {
		failures = append(failures, c.RemoveCommitted(ctx, one.Name))
	}
	images, err := c.Images(ctx)
	failures = append(failures, err)
	for _, img := range images {
		failures = append(failures, c.RemoveImage(ctx, img.Ref))
	}
	return errors.Join(failures...)
}

// LabelRecord sets only a label of a container; an empty value removes the label. No container is
// an errs.ErrNotFound.
func (c *Client) LabelRecord(ctx context.Context, id, label, value string) error {
	ctx, cancel := c.uninterrupted(ctx)
	defer cancel()
	row := containers.Container{ID: id, Labels: map[string]string{}}
	if value != "" {
		row.Labels[label] = value
	}
	_, err := c.api.ContainerService().Update(ctx, row, "labels."+label)
	return kind(fmt.Sprintf("label record of container %s", id), err)
}
