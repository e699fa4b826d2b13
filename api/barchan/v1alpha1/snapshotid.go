package v1alpha1

import "cmp"

// SnapshotName is the name and the tag under which the API shows a checkpoint as a snapshot. One that
// was created as an object, without labels, has its object's name.
func (c *Checkpoint) SnapshotName() (name, tag string) {
	return cmp.Or(c.Labels[LabelSnapshot], c.Name), cmp.Or(c.Labels[LabelTag], DefaultTag)
}

// SnapshotID is "<name>:<tag>", the one ID of a snapshot in every API. It is empty for a checkpoint that
// the server made for its own use, which no API shows as a snapshot.
func (c *Checkpoint) SnapshotID() string {
	if c.Labels[LabelPurpose] != "" {
		return ""
	}
	name, tag := c.SnapshotName()
	return name + ":" + tag
}
