package buildlog

import (
	"bytes"
	"slices"
)

// leastMasked is the length of the shortest text that is masked: to mask shorter ones would say what they are, and spoil lines.
const leastMasked = 4

// masks are texts that no line of the log has: the lines of secrets.
type masks [][]byte

// masksOf returns them, longest first, so that none is left that has another as its part.
func masksOf(secrets map[string][]byte) (m masks) {
	for _, secret := range secrets {
		for line := range bytes.Lines(secret) {
			if line = bytes.TrimSpace(line); len(line) >= leastMasked {
				m = append(m, line)
			}
		}
	}
	slices.SortFunc(m, func(a, b []byte) int { return len(b) - len(a) })
	return m
}

// hide replaces them in a line.
func (m masks) hide(line []byte) []byte {
	for _, secret := range m {
		line = bytes.ReplaceAll(line, secret, []byte("***"))
	}
	return line
}

// longest returns the bytes of the longest one.
func (m masks) longest() int {
	if len(m) == 0 {
		return 0
	}
	return len(m[0])
}
