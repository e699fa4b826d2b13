// Package files measures files of sandboxes: a large one that is carried to a sandbox and back, beside a plain copy, and those of a
// volume, beside the same in the sandbox's root.
package files
