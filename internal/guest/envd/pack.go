package envd

import "path"

// FlagPack has the agent's program write an archive of files to its standard output. Its value is a [PackRequest] in JSON.
const FlagPack = "pack"

// Program is the agent's program in a sandbox of its own.
var Program = path.Join(path.Dir(ConfigPath), "agent")

// PackRequest names the files of an archive, by their paths in the sandbox.
type PackRequest struct {
	// Paths are absolute, and may have wildcards.
	Paths []string `json:"paths"`
	// Exclude are patterns of .dockerignore, relative to each of Paths.
	Exclude []string `json:"exclude,omitempty"`
	// Parents keeps the directories of Paths, from the root or from "/./" in them.
	Parents bool `json:"parents,omitempty"`
	// MaxBytes and MaxFiles bound the files' sizes together, and their number. Required.
	MaxBytes int64 `json:"maxBytes"`
	MaxFiles int   `json:"maxFiles"`
}
