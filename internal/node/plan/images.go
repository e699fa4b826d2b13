package plan

import "github.com/barchan-dev/barchan/internal/node/ctrd"

// Images are the images that the containers of a sandbox were created from. Rows of databases embed it: its JSON keys are
// permanent.
type Images struct {
	// ContainerImage is that of the first container.
	ContainerImage
	// Sidecars are those of the plan's sidecars, by name.
	Sidecars map[string]ContainerImage `json:"sidecars,omitempty"`
}

// ContainerImage is the image that a container was created from.
type ContainerImage struct {
	Digest string `json:"digest,omitempty"`
	// ImageEnv is the image's environment, the base of the plan's. Nil means unknown, as in older rows.
	ImageEnv []string `json:"imageEnv,omitzero"`
	// ImageRun is the image's other configuration of programs; nil as ImageEnv is.
	ImageRun *ImageRun `json:"imageRun,omitempty"`
}

// ImageRun is an image's configuration of programs, besides their environment.
type ImageRun struct {
	Ref        string   `json:"ref"`
	Entrypoint []string `json:"entrypoint,omitempty"`
	Cmd        []string `json:"cmd,omitempty"`
	Workdir    string   `json:"workdir,omitempty"`
	User       string   `json:"user,omitempty"`
}

// RecordOf returns what a row keeps of an image.
func RecordOf(img ctrd.Image) ContainerImage {
	c := &img.Config
	return ContainerImage{
		Digest: img.Digest, ImageEnv: append([]string{}, c.Env...),
		ImageRun: &ImageRun{Ref: img.Ref, Entrypoint: c.Entrypoint, Cmd: c.Cmd, Workdir: c.WorkingDir, User: c.User},
	}
}

// Image returns the image, whatever its name refers to now. ImageRun must be known.
func (c *ContainerImage) Image() ctrd.Image {
	img := ctrd.Image{Ref: c.ImageRun.Ref, Digest: c.Digest}
	img.Config.Env, img.Config.Entrypoint, img.Config.Cmd = c.ImageEnv, c.ImageRun.Entrypoint, c.ImageRun.Cmd
	img.Config.WorkingDir, img.Config.User = c.ImageRun.Workdir, c.ImageRun.User
	return img
}

// ImageOf returns the image of a container, whose name is empty for the first.
func (i *Images) ImageOf(name string) ContainerImage {
	if name == "" {
		return i.ContainerImage
	}
	return i.Sidecars[name]
}

// Uses reports whether a container has the image of a digest.
func (i *Images) Uses(digest string) bool {
	for _, c := range i.Sidecars {
		if c.Digest == digest {
			return true
		}
	}
	return i.Digest == digest
}
