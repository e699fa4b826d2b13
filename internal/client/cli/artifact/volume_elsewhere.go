package artifact

import (
	"errors"
	"fmt"
	"io"
	"net/url"
	"strings"

	"github.com/spf13/cobra"

	"github.com/barchan-dev/barchan/client"
	"github.com/barchan-dev/barchan/internal/client/cli/app"
)

// maxSecret bounds what is read of a key or of certificates, in bytes.
const maxSecret = 64 << 10

// Variables of AWS's own programs, which count where a flag is missing.
const (
	envAccessKeyID     = "AWS_ACCESS_KEY_ID"
	envSecretAccessKey = "AWS_SECRET_ACCESS_KEY"
	envSessionToken    = "AWS_SESSION_TOKEN"
	envRegion          = "AWS_REGION"
)

// elsewhereFlags are those of a volume whose files are elsewhere.
type elsewhereFlags struct {
	s3, region, secretName, accessKeyID, secretFile, caFile, nfs string
	options                                                      []string
	readOnly                                                     bool
}

func (b *elsewhereFlags) register(cmd *cobra.Command) {
	f := cmd.Flags()
	f.StringVar(&b.s3, "s3", "", "bucket with the files: ENDPOINT/BUCKET[/PREFIX]")
	f.StringVar(&b.region, "region", "", "region of the bucket (default $"+envRegion+", or us-east-1)")
	f.StringVar(&b.accessKeyID, "access-key-id", "", "ID of the key (default $"+envAccessKeyID+")")
	f.StringVar(&b.secretFile, "secret-file", "", "file with the key's secret, or - (default $"+envSecretAccessKey+")")
	f.StringVar(&b.secretName, "secret", "", "Secret of the namespace that has the key instead")
	f.StringVar(&b.caFile, "ca-file", "", "PEM file with the endpoint's authorities")
	f.StringVar(&b.nfs, "nfs", "", "export with the files: SERVER:/PATH")
	f.StringSliceVar(&b.options, "mount-option", nil, "option of the export, such as port=2050")
	f.BoolVar(&b.readOnly, "read-only", false, "no sandbox changes the files")
}

// add sets where the files are, unless they are the server's.
func (b *elsewhereFlags) add(cmd *cobra.Command, a *app.App, n *client.VolumeOptions) (err error) {
	n.ReadOnly = b.readOnly
	switch {
	case b.s3 != "" && b.nfs != "":
		return app.Usage(cmd, errors.New("--s3 and --nfs: want one"))
	case b.s3 == "":
		for _, name := range []string{"region", "access-key-id", "secret-file", "secret", "ca-file"} {
			if cmd.Flags().Changed(name) {
				return app.Usage(cmd, fmt.Errorf("--%s goes with --s3", name))
			}
		}
	}
	switch {
	case b.nfs == "" && len(b.options) > 0:
		return app.Usage(cmd, errors.New("--mount-option goes with --nfs"))
	case b.s3 == "" && b.nfs == "" && b.readOnly:
		return app.Usage(cmd, errors.New("--read-only goes with --s3 and --nfs"))
	case b.nfs != "":
		n.NFS, err = b.export(cmd)
	case b.s3 != "":
		n.S3, err = b.bucket(cmd, a)
	}
	return err
}

func (b *elsewhereFlags) export(cmd *cobra.Command) (*client.VolumeExport, error) {
	server, path, ok := strings.Cut(b.nfs, ":/")
	if !ok || server == "" {
		return nil, app.Usage(cmd, errors.New("--nfs: want SERVER:/PATH, such as nfs.example.com:/srv/data"))
	}
	return &client.VolumeExport{Server: strings.Trim(server, "[]"), Path: "/" + path, MountOptions: b.options}, nil
}

// bucket returns the bucket, with its key.
func (b *elsewhereFlags) bucket(cmd *cobra.Command, a *app.App) (*client.VolumeBucket, error) {
	u, err := url.Parse(b.s3)
	if err != nil || (u.Scheme != "https" && u.Scheme != "http") || u.Host == "" || u.User != nil || u.RawQuery != "" || u.Fragment != "" || strings.Trim(u.Path, "/") == "" {
		return nil, app.Usage(cmd, errors.New("--s3: want ENDPOINT/BUCKET[/PREFIX], such as https://s3.example.com/models/v2"))
	}
	name, prefix, _ := strings.Cut(strings.TrimPrefix(u.Path, "/"), "/")
	out := &client.VolumeBucket{
		Endpoint: u.Scheme + "://" + u.Host, Bucket: name, Prefix: strings.TrimSuffix(prefix, "/"),
		Region: a.First(b.region, envRegion), SecretName: b.secretName,
	}
	if b.secretName != "" && (b.accessKeyID != "" || b.secretFile != "" || b.caFile != "") {
		return nil, app.Usage(cmd, errors.New("--secret has the key and its certificates; leave out --access-key-id, --secret-file and --ca-file"))
	}
	if b.secretName == "" {
		err = b.readKey(cmd, a, out)
	}
	return out, err
}

// readKey reads the key, whose secret no argument has: other users see those.
func (b *elsewhereFlags) readKey(cmd *cobra.Command, a *app.App, out *client.VolumeBucket) (err error) {
	if out.AccessKeyID = a.First(b.accessKeyID, envAccessKeyID); out.AccessKeyID == "" {
		return app.Usage(cmd, errors.New("--access-key-id, or --secret, is missing"))
	}
	if b.secretFile == "" {
		out.SecretAccessKey, out.SessionToken = a.First("", envSecretAccessKey), a.First("", envSessionToken)
	} else if out.SecretAccessKey, err = readText(cmd, a, b.secretFile); err != nil {
		return err
	}
	if out.SecretAccessKey == "" {
		return app.Usage(cmd, errors.New("the key's secret is missing; give --secret-file, or set "+envSecretAccessKey))
	}
	if b.caFile != "" {
		out.CA, err = readText(cmd, a, b.caFile)
	}
	return err
}

func readText(cmd *cobra.Command, a *app.App, name string) (string, error) {
	in, err := a.Open(cmd.Context(), name)
	if err != nil {
		return "", err
	}
	defer func() { _ = in.Close() }()
	text, err := io.ReadAll(io.LimitReader(in, maxSecret))
	if err != nil {
		return "", fmt.Errorf("read %s: %w", name, err)
	}
	return strings.TrimSpace(string(text)), nil
}
