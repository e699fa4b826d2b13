// Package images measures what sandboxes are made from: images that are imported, templates that are built from a Dockerfile, and the
// code interpreter's image, in whose sandboxes code runs. Their floors are tar, a cold create, and code that is not the first.
package images
