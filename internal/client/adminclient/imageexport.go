package adminclient

import (
	"context"
	"io"
	"net/http"
	"net/url"
)

// PathImageExport is the route for the export of images.
const PathImageExport = "/v1/images/export"

// ImageExport requests an image as a tar.
type ImageExport struct {
	// Source is a template of Namespace, or else an image.
	Namespace, Source string
	// Name is the image's in the tar; empty: the image's own, or one made of the template's.
	Name string
}

// ExportImage requests an image as a tar. An incomplete tar is an error of the reader's.
func (c *Client) ExportImage(ctx context.Context, req ImageExport) (io.ReadCloser, error) {
	query := url.Values{"namespace": {req.Namespace}, "source": {req.Source}, "name": {req.Name}}
	res, err := c.send(ctx, http.MethodPost, PathImageExport+"?"+query.Encode(), nil) //nolint:bodyclose // the caller closes it
	if err != nil {
		return nil, err
	}
	return &Exported{Reader: &trailed{res}, body: res.Body}, nil
}
