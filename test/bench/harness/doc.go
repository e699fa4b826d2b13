// Package harness is what the chapters of the benchmark measure with. It starts a server of its own, which its clients use from
// outside as users do, makes sandboxes and pools in it, waits until they are there or gone, and removes everything at the end. What
// is measured, and which bar it shall keep to, is the chapters'.
package harness
