package build

import (
	"errors"
	"fmt"

	"github.com/distribution/reference"
	"github.com/docker/cli/cli/config"
	"github.com/docker/cli/cli/config/configfile"

	"github.com/barchan-dev/barchan/client/template"
	"github.com/barchan-dev/barchan/internal/base/errs"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

const (
	// noAuth is the value of --registry-auth that sends no credentials.
	noAuth = "none"
	// dockerHub is how Docker's configuration names docker.io.
	dockerHub = "https://index.docker.io/v1/"
)

// authenticate gives the images of a build the credentials that Docker's configuration of a directory has for their registries.
func authenticate(a *app.App, dir string, s *template.Spec) error {
	if dir == noAuth {
		return nil
	}
	if dir = a.First(dir, "DOCKER_CONFIG"); dir == "" {
		dir = config.Dir()
	}
	file, err := config.Load(dir)
	if err != nil {
		return fmt.Errorf("read Docker's configuration in %s; --registry-auth none leaves it out: %w", dir, err)
	}
	used := map[string]bool{}
	give := func(image string, to **template.Registry) error {
		host, auth, err := credentials(file, image)
		if err != nil || auth == nil {
			return err
		}
		if *to = auth; !used[host] {
			fmt.Fprintf(a.Stderr, "note: images of %s are pulled with the credentials of Docker's configuration\n", host)
		}
		used[host] = true
		return nil
	}
	err = give(s.FromImage, &s.Registry)
	for i := range s.Stages {
		err = errors.Join(err, give(s.Stages[i].FromImage, &s.Stages[i].Registry))
	}
	return err
}

// credentials returns those of an image's registry; nil: there are none. No error has them.
func credentials(file *configfile.ConfigFile, image string) (host string, auth *template.Registry, err error) {
	named, err := reference.ParseNormalizedNamed(image)
	if err != nil { // a template, or what the server refuses
		return "", nil, nil //nolint:nilerr // it has no registry
	}
	host = reference.Domain(named)
	key := host
	if host == "docker.io" {
		key = dockerHub
	}
	found, err := file.GetAuthConfig(key)
	switch {
	case err != nil:
		return host, nil, fmt.Errorf("credentials of %s in Docker's configuration; --registry-auth none leaves them out: %w", host, err)
	case found.IdentityToken != "" || found.RegistryToken != "":
		return host, nil, fmt.Errorf("credentials of %s in Docker's configuration are a token; a build needs a user and a password, --registry-auth none leaves them out: %w", host, errs.ErrInvalid)
	case found.Username == "" || found.Password == "":
		return host, nil, nil
	}
	return host, &template.Registry{Type: "registry", Username: found.Username, Password: found.Password}, nil
}
